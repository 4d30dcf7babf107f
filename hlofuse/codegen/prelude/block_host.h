// What a block is on the CPU: one thread, lanes that the compiler turns into vectors, shared memory on the stack.
#define INLINE __attribute__((always_inline))
#define DEVICE static inline INLINE
#define RESTRICT __restrict
#define IN(T) const T* RESTRICT
#define OUT(T) T* RESTRICT
#define SCRATCH(T) T* RESTRICT
#define SHARED(T, name, size) T name[size]
#define BARRIER()
typedef long long BlockIndex;
#define THREAD 0
#define FOR_LANES(l, count) for (int l = 0; l < (count); l++)

// As FOR_LANES, never written out: g++ 12 makes wrong vectors of a few bools that become numbers, without a loop.
#define FOR_RUN(l, count) _Pragma("GCC unroll 1") for (int l = 0; l < (count); l++)

// Calls body(i) for each index in [begin, end), in any order: what one call writes, no other reads. Never written out.
template <int THREADS, class Index, class Body>
DEVICE void for_points(Index begin, Index end, Body body) {
#pragma GCC ivdep
#pragma GCC unroll 1
  for (Index i = begin; i < end; i++) body(i);
}

// The same where a call may come twice: no points are left over from vectors, the last 16 are computed together.
template <int THREADS, class Index, class Body>
DEVICE void for_points_again(Index begin, Index end, Body body) {
  const Index rest = end - begin < 16 ? 0 : (end - begin) % 16;
  for_points<THREADS>(begin, end - rest, body);
  if (rest) for_points<THREADS>(end - 16, end, body);
}

// Calls body(row) for each row; on the GPU each group of GROUP threads has rows of its own.
template <int THREADS, int GROUP, class Body>
DEVICE void for_rows(int rows, Body body) {
  for (int row = 0; row < rows; row++) body(row);
}

// Calls body(start, count) for each run of LANES indices in [begin, end); the last run may be shorter.
template <int THREADS, int LANES, class Index, class Body>
DEVICE void for_tiles(Index begin, Index end, Body body) {
  Index at = begin;
  for (; at + LANES <= end; at += LANES) body(at, LANES);
  if (at < end) body(at, (int)(end - at));
}

// The same where no run is shorter.
template <int THREADS, int LANES, class Index, class Body>
DEVICE void for_whole_tiles(Index begin, Index end, Body body) {
  for (Index at = begin; at < end; at += LANES) body(at, LANES);
}

// The same where each run's place in a kept row is wanted too: body(start, count, slot).
template <int THREADS, int LANES, int STEPS, class Index, class Body>
DEVICE void for_kept_tiles(Index end, Body body) {
  Index at = 0;
  for (; at + LANES <= end; at += LANES) body(at, LANES, (int)at);
  if (at < end) body(at, (int)(end - at), (int)at);
}

template <int THREADS, int LANES, int STEPS, class Index, class Body>
DEVICE void for_kept_whole_tiles(Index end, Body body) {
  for (Index at = 0; at < end; at += LANES) body(at, LANES, (int)at);
}

// The same in batches of STEPS runs, each with its place in the batch: body(start, count, slot), then add(filled). The
// compiler makes vectors of lanes, so that a batch is one run, and reciprocals of counts are the lanes' together.
template <int THREADS, int LANES, int STEPS, class Index, class Body, class Add>
DEVICE void for_tile_batches(Index begin, Index end, Body body, Add add) {
  static_assert(STEPS == 1, "");
  Index at = begin;
  for (; at + LANES <= end; at += LANES) {
    body(at, LANES, 0);
    add(LANES);
  }
  if (at < end) {
    body(at, (int)(end - at), 0);
    add((int)(end - at));
  }
}

// The rows [begin, end) of columns in batches of STEPS: body(row, slot), then add(steps).
template <int LANES, int STEPS, class Index, class Body, class Add>
DEVICE void for_batches(Index begin, Index end, Body body, Add add) {
  static_assert(STEPS == 1, "");
  for (Index at = begin; at < end; at++) {
    body(at, 0);
    add(1);
  }
}

// Adds an element to the first `lanes` lanes' mean, sum of squared deviations and count (Welford). Lanes to the left have
// as many elements or more, so that all have as many if the first and the last have.
template <int LANES, int STEPS, class Reduce, class T>
DEVICE void add_moments(Reduce, T* RESTRICT mean, T* RESTRICT deviations, T* RESTRICT count, const T* RESTRICT x,
                        int lanes) {
  if (count[0] == count[lanes - 1]) {
    const T share = 1 / (count[0] + 1);
    for (int l = 0; l < lanes; l++) {
      const T delta = x[l] - mean[l];
      mean[l] += delta * share;
      deviations[l] += delta * (x[l] - mean[l]);
      count[l] += 1;
    }
  } else {
    for (int l = 0; l < lanes; l++) {
      const T delta = x[l] - mean[l];
      count[l] += 1;
      mean[l] += delta / count[l];
      deviations[l] += delta * (x[l] - mean[l]);
    }
  }
}

template <int LANES, int STEPS, class Reduce, class T>
DEVICE void add_moments_by_lane(Reduce reduce, T* mean, T* deviations, T* count, const T* x, int, int lanes) {
  add_moments<LANES, 1>(reduce, mean, deviations, count, x, lanes);
}

// Adds an element to the first `lanes` lanes' maximum and sum of exp(x - maximum): one exponential, as many as a batch of
// one would need anyway.
template <int LANES, int STEPS, class Reduce, class T>
DEVICE void add_online(Reduce reduce, T* RESTRICT upper, T* RESTRICT sum, const T* RESTRICT x, int lanes) {
  for (int l = 0; l < lanes; l++) reduce(upper[l], sum[l], x[l], (T)1);
}

template <int LANES, int STEPS, class Reduce, class T>
DEVICE void add_online_by_lane(Reduce reduce, T* upper, T* sum, const T* x, int, int lanes) {
  add_online<LANES, 1>(reduce, upper, sum, x, lanes);
}

// Calls body(row, column) for every element of a tile of at most ROWS x COLUMNS.
template <int THREADS, int ROWS, int COLUMNS, class Body>
DEVICE void for_tile(int rows, int columns, Body body) {
  if (columns == COLUMNS) {
    for (int row = 0; row < rows; row++)
      for (int column = 0; column < COLUMNS; column++) body(row, column);
  } else {
    for (int row = 0; row < rows; row++)
      for (int column = 0; column < columns; column++) body(row, column);
  }
}

// Folds the lanes' partial results in a fixed tree; the result is in lane 0. A function of its own: with a tree for each
// of many reductions in one body, compiling took five times as long, and the kernels are no faster.
template <int LANES, class Reduce, class... T>
static __attribute__((noinline)) void fold_lanes(Reduce reduce, T*... values) {
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int l = 0; l < width; l++) reduce(values[l]..., values[l + width]...);
}

template <int THREADS, class Reduce, class... T>
DEVICE void fold_threads(Reduce, T&...) {}

// Calls body(start, count) for each run of LANES indices in [0, end), in order; on the GPU all threads together, and
// `count` may be 0.
template <int THREADS, int LANES, class Index, class Body>
DEVICE void for_scan_tiles(Index end, Body body) {
  for (Index at = 0; at < end; at += LANES) body(at, end - at < LANES ? (int)(end - at) : LANES);
}

// Makes of each value the fold of the carry and of all values up to it, and of the carry the last of them.
template <int THREADS, int LANES, class Reduce, class T>
static __attribute__((noinline)) void scan_lanes(Reduce reduce, T* values, T& carry) {
  for (int distance = 1; distance < LANES; distance *= 2) {
    T before[LANES];
    for (int l = 0; l < LANES; l++) before[l] = values[l];
    for (int l = distance; l < LANES; l++) {
      T folded = before[l - distance];
      reduce(folded, before[l]);
      values[l] = folded;
    }
  }
  const T first = carry;
  for (int l = 0; l < LANES; l++) {
    T folded = first;
    reduce(folded, values[l]);
    values[l] = folded;
  }
  carry = values[LANES - 1];
}

// Whether any lane of a run goes on.
template <int LANES>
DEVICE bool any_lane(const int* live, int count) {
  int any = 0;
  for (int l = 0; l < LANES; l++)
    any |= l < count ? live[l] : 0;
  return any != 0;
}

// True in the one block that finishes last of `blocks`; the others' writes are visible to it.
DEVICE bool is_last_block(unsigned* counter, unsigned blocks) {
  return __atomic_add_fetch(counter, 1u, __ATOMIC_ACQ_REL) == blocks;
}

// Calls body(row, column) for every cell of a tile of rows x COLUMNS, or of fewer columns.
template <int THREADS, int COLUMNS, class Body>
DEVICE void for_cells(int rows, int columns, Body body) {
  for_tile<THREADS, 0, COLUMNS>(rows, columns, body);
}

// Calls fold_row(update, row) for every update in [begin, end) that has a row, in order.
template <int THREADS, int ROUND, class Index, class Row, class FoldRow>
DEVICE void for_updates(Index begin, Index end, Row row_of, FoldRow fold_row) {
  for (Index update = begin; update < end; update++) {
    const int row = row_of(update);
    if (row >= 0) fold_row(update, row);
  }
}

// The same, and fold(row, column, read(update, column)) for every column.
template <int THREADS, int ROUND, int COLUMNS, class Index, class Row, class FoldRow, class Read, class Fold>
DEVICE void for_wide_updates(Index begin, Index end, int columns, Row row_of, FoldRow fold_row, Read read, Fold fold) {
  for (Index update = begin; update < end; update++) {
    const int row = row_of(update);
    if (row < 0) continue;
    fold_row(update, row);
    if (columns == COLUMNS) {
      for (int column = 0; column < COLUMNS; column++) fold(row, column, read(update, column));
    } else {
      for (int column = 0; column < columns; column++) fold(row, column, read(update, column));
    }
  }
}
