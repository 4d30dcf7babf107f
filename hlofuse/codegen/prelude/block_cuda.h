// What a block is on the GPU: THREADS threads, each with LANES neighboring elements. SIMT executes this very text: memory
// is only touched in the ways of memory_cuda.h.
#define INLINE
#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define BARRIER() __syncthreads()
typedef int BlockIndex;
#define THREAD ((int)threadIdx.x % THREADS)  // several groups of THREADS may share a block, each with its own BLOCK
#define FOR_LANES(l, count) _Pragma("unroll") for (int l = 0; l < LANES; l++) if (l < (count))
#define FOR_RUN(l, count) FOR_LANES(l, count)

// Calls body(i) for each index in [begin, end) that is this thread's.
template <int THREADS, class Index, class Body>
DEVICE void for_points(Index begin, Index end, Body body) {
  for (Index i = begin + THREAD; i < end; i += THREADS) body(i);
}

template <int THREADS, class Index, class Body>
DEVICE void for_points_again(Index begin, Index end, Body body) {
  for_points<THREADS>(begin, end, body);
}

// Calls body(row) for each row of this thread's group of GROUP.
template <int THREADS, int GROUP, class Body>
DEVICE void for_rows(int rows, Body body) {
  for (int row = THREAD / GROUP; row < rows; row += THREADS / GROUP) body(row);
}

// Calls body(start, count) for each run of LANES indices in [begin, end) that is this thread's. Only the last run of all
// may be shorter than LANES: elsewhere `count` is a constant, and the lanes need no guard.
template <int THREADS, int LANES, class Index, class Body>
DEVICE void for_tiles(Index begin, Index end, Body body) {
  Index at = begin + THREAD * LANES;
  for (; at + LANES <= end; at += THREADS * LANES) body(at, LANES);
  if (LANES > 1 && at < end) body(at, (int)(end - at));
}

// The same where no run is shorter.
template <int THREADS, int LANES, class Index, class Body>
DEVICE void for_whole_tiles(Index begin, Index end, Body body) {
  for (Index at = begin + THREAD * LANES; at < end; at += THREADS * LANES) body(at, LANES);
}

// The same over a row from 0 on where each run's place in the thread's registers is wanted too: body(start, count, slot).
template <int THREADS, int LANES, int STEPS, class Index, class Body>
DEVICE void for_kept_tiles(Index end, Body body) {
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    const Index at = (step * THREADS + THREAD) * LANES;
    if (at < end) body(at, end - at < LANES ? (int)(end - at) : LANES, step * LANES);
  }
}

template <int THREADS, int LANES, int STEPS, class Index, class Body>
DEVICE void for_kept_whole_tiles(Index end, Body body) {
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    const Index at = (step * THREADS + THREAD) * LANES;
    if (at < end) body(at, LANES, step * LANES);
  }
}

// The same in batches of STEPS runs, each with its place in the batch: body(start, count, slot), then add(filled).
template <int THREADS, int LANES, int STEPS, class Index, class Body, class Add>
DEVICE void for_tile_batches(Index begin, Index end, Body body, Add add) {
  Index at = begin + THREAD * LANES;
  for (; at + (STEPS - 1) * THREADS * LANES + LANES <= end; at += STEPS * THREADS * LANES) {
#pragma unroll
    for (int step = 0; step < STEPS; step++) body(at + step * THREADS * LANES, LANES, step * LANES);
    add(STEPS * LANES);
  }
  for (; at < end; at += THREADS * LANES) {
    const int count = end - at < LANES ? (int)(end - at) : LANES;
    body(at, count, 0);
    add(count);
  }
}

// The rows [begin, end) of columns in batches of STEPS: body(row, slot), then add(steps).
template <int LANES, int STEPS, class Index, class Body, class Add>
DEVICE void for_batches(Index begin, Index end, Body body, Add add) {
  Index at = begin;
  for (; at + STEPS <= end; at += STEPS) {
#pragma unroll
    for (int step = 0; step < STEPS; step++) body(at + step, step * LANES);
    add(STEPS);
  }
  for (; at < end; at++) {
    body(at, 0);
    add(1);
  }
}

// LANES neighboring elements in registers, read and written in words of up to 16 bytes.
template <class T, int LANES>
struct alignas(sizeof(T) * LANES < 16 ? sizeof(T) * LANES : 16) Lanes {
  T values[LANES];
  DEVICE_MEMBER const T& operator[](int l) const { return values[l]; }
  DEVICE_MEMBER T& operator[](int l) { return values[l]; }
};

// Elements at, at + 1, … of an array, `at` a multiple of LANES.
template <int LANES, class T, class Index>
DEVICE Lanes<T, LANES> read_lanes(IN(T) x, Index at, int count) {
  Lanes<T, LANES> lanes;
  if (count == LANES) return load_vector<Lanes<T, LANES>>(x, at);
#pragma unroll
  for (int l = 0; l < LANES; l++)
    if (l < count) lanes[l] = x[at + l];
  return lanes;
}

// What is assigned to its lanes is written at the end of its scope.
template <class T, int LANES>
struct WrittenLanes {
  SCRATCH(T) to;
  int count;
  Lanes<T, LANES> lanes;
  DEVICE_MEMBER T& operator[](int l) { return lanes[l]; }
  DEVICE_MEMBER ~WrittenLanes() {
    if (count == LANES) {
      store_vector(to, 0, lanes);
    } else {
#pragma unroll
      for (int l = 0; l < LANES; l++)
        if (l < count) to[l] = lanes[l];
    }
  }
};

template <int LANES, class T, class Index>
DEVICE WrittenLanes<T, LANES> write_lanes(OUT(T) out, Index at, int count) {
  return WrittenLanes<T, LANES>{out + at, count};
}

// Calls body(row, column) for every element of a tile of at most ROWS x COLUMNS; neighbors in a row are neighbor threads.
template <int THREADS, int ROWS, int COLUMNS, class Body>
DEVICE void for_tile(int rows, int columns, Body body) {
  const int column = THREAD % COLUMNS;
#pragma unroll
  for (int row = THREAD / COLUMNS; row < ROWS; row += THREADS / COLUMNS)
    if (row < rows && column < columns) body(row, column);
}

// Folds the lanes' partial results in a fixed tree; the result is in lane 0.
template <int LANES, class Reduce, class... T>
DEVICE void fold_lanes(Reduce reduce, T*... values) {
#pragma unroll
  for (int width = LANES / 2; width > 0; width /= 2)
#pragma unroll
    for (int l = 0; l < width; l++) reduce(values[l]..., values[l + width]...);
}

// The threads of a warp that belong to this thread's group.
template <int THREADS>
DEVICE unsigned group_mask() {
  if constexpr (THREADS >= 32) return 0xffffffffu;
  return ((1u << (THREADS % 32)) - 1) << ((threadIdx.x & 31) & ~(THREADS - 1));
}

// The value that the thread `distance` further has, and the value of the group's first thread (of a warp, if larger).
template <int THREADS, bool FIRST, class T>
DEVICE T shuffle(T value, int distance) {
  constexpr int WORDS = (sizeof(T) + 3) / 4, WIDTH = THREADS < 32 ? THREADS : 32;
  union { unsigned bits[WORDS]; T value; } words;
  words.bits[0] = 0;
  words.value = value;
#pragma unroll
  for (int k = 0; k < WORDS; k++)
    words.bits[k] = FIRST ? __shfl_sync(group_mask<THREADS>(), words.bits[k], 0, WIDTH)
                          : __shfl_down_sync(group_mask<THREADS>(), words.bits[k], distance, WIDTH);
  return words.value;
}

template <int...> struct Numbers {};
template <int N, int... REST> struct NumbersBelow : NumbersBelow<N - 1, N - 1, REST...> {};
template <int... REST> struct NumbersBelow<0, REST...> { typedef Numbers<REST...> type; };

// Where the warps leave their values number N.
template <int WARPS, int N, class T>
DEVICE SCRATCH(T) warp_slots() {
  SHARED(T, slots, WARPS);
  return slots;
}

template <int WARPS, class Reduce, int... N, class... T>
DEVICE void fold_warps(Reduce reduce, Numbers<N...>, T&... values) {
  if ((threadIdx.x % (WARPS * 32)) % 32 == 0) ((warp_slots<WARPS, N, T>()[(threadIdx.x % (WARPS * 32)) / 32] = values), ...);
  BARRIER();
  ((values = warp_slots<WARPS, N, T>()[0]), ...);
#pragma unroll
  for (int warp = 1; warp < WARPS; warp++) reduce(values..., warp_slots<WARPS, N, T>()[warp]...);
  BARRIER();
}

// Folds over THREADS threads in a fixed tree; afterwards every thread has the result. Up to a warp needs no barrier, so
// that several such groups may share a block.
template <int THREADS, class Reduce, class... T>
DEVICE void fold_threads(Reduce reduce, T&... values) {
#pragma unroll
  for (int distance = (THREADS < 32 ? THREADS : 32) / 2; distance > 0; distance /= 2)
    reduce(values..., shuffle<THREADS, false>(values, distance)...);
  if constexpr (THREADS <= 32) {
    ((values = shuffle<THREADS, true>(values, 0)), ...);
  } else {
    fold_warps<THREADS / 32>(reduce, typename NumbersBelow<sizeof...(T)>::type(), values...);
  }
}

// Adds the `filled` first elements of a batch to lane 0's mean, sum of squared deviations and count (Chan).
template <int LANES, int STEPS, class Reduce, class T>
DEVICE void add_moments(Reduce reduce, T* mean, T* deviations, T* count, const T* x, int filled) {
  T sum = 0, squares = 0;
#pragma unroll
  for (int k = 1; k < STEPS * LANES; k++)
    if (k < filled) sum += x[k] - x[0];
  const T center = x[0] + sum / filled;
#pragma unroll
  for (int k = 0; k < STEPS * LANES; k++)
    if (k < filled) squares += (x[k] - center) * (x[k] - center);
  reduce(mean[0], deviations[0], count[0], center, squares, (T)filled);
}

// One lane's elements of a batch, of which each step has LANES.
template <int LANES, int STEPS, class T>
DEVICE void copy_column(T (&column)[STEPS], const T* x, int steps) {
#pragma unroll
  for (int step = 0; step < STEPS; step++)
    if (step < steps) column[step] = x[step * LANES];
}

// The same where each lane is a column of its own, of which a batch has `steps` elements.
template <int LANES, int STEPS, class Reduce, class T>
DEVICE void add_moments_by_lane(Reduce reduce, T* mean, T* deviations, T* count, const T* x, int steps, int lanes) {
#pragma unroll
  for (int l = 0; l < LANES; l++) {
    if (l >= lanes) continue;
    T column[STEPS];
    copy_column<LANES>(column, x + l, steps);
    add_moments<1, STEPS>(reduce, mean + l, deviations + l, count + l, column, steps);
  }
}

// Adds the `filled` first elements of a batch to lane 0's maximum and sum of exp(x - maximum), with a maximum of the
// batch's own. Where a maximum is not finite, nobody reads its sum.
template <int LANES, int STEPS, class Reduce, class T>
DEVICE void add_online(Reduce reduce, T* upper, T* sum, const T* x, int filled) {
  T greatest = x[0], total = 0;
#pragma unroll
  for (int k = 1; k < STEPS * LANES; k++)
    if (k < filled) greatest = max_nan(greatest, x[k]);
#pragma unroll
  for (int k = 0; k < STEPS * LANES; k++)
    if (k < filled) total += exp_of(x[k] - greatest);
  reduce(upper[0], sum[0], greatest, greatest - greatest == 0 ? total : (T)0);
}

// The same where each lane is a column of its own, of which a batch has `steps` elements.
template <int LANES, int STEPS, class Reduce, class T>
DEVICE void add_online_by_lane(Reduce reduce, T* upper, T* sum, const T* x, int steps, int lanes) {
#pragma unroll
  for (int l = 0; l < LANES; l++) {
    if (l >= lanes) continue;
    T column[STEPS];
    copy_column<LANES>(column, x + l, steps);
    add_online<1, STEPS>(reduce, upper + l, sum + l, column, steps);
  }
}

// Calls body(start, count) for each run of LANES indices in [0, end): all threads together, in order; `count` may be 0.
template <int THREADS, int LANES, class Index, class Body>
DEVICE void for_scan_tiles(Index end, Body body) {
  for (Index first = 0; first < end; first += THREADS * LANES) {
    const Index at = first + THREAD * LANES;
    body(at, at >= end ? 0 : end - at < LANES ? (int)(end - at) : LANES);
  }
}

// The value that thread `source` of this thread's warp (or group, if smaller) has.
template <int THREADS, class T>
DEVICE T shuffle_from(T value, int source) {
  constexpr int WORDS = (sizeof(T) + 3) / 4, WIDTH = THREADS < 32 ? THREADS : 32;
  union { unsigned bits[WORDS]; T value; } words;
  words.bits[0] = 0;
  words.value = value;
#pragma unroll
  for (int k = 0; k < WORDS; k++) words.bits[k] = __shfl_sync(group_mask<THREADS>(), words.bits[k], source, WIDTH);
  return words.value;
}

// Makes of each value the fold of the carry and of all values up to it, over the runs of all threads in order, and of
// the carry the last of them: a fixed tree within a warp, and the warps one after another.
template <int THREADS, int LANES, class Reduce, class T>
DEVICE void scan_lanes(Reduce reduce, T* values, T& carry) {
  constexpr int WIDTH = THREADS < 32 ? THREADS : 32;
  const int place = THREAD % WIDTH;
#pragma unroll
  for (int l = 1; l < LANES; l++) {
    T folded = values[l - 1];
    reduce(folded, values[l]);
    values[l] = folded;
  }
  T upto = values[LANES - 1];
#pragma unroll
  for (int distance = 1; distance < WIDTH; distance *= 2) {
    T folded = shuffle_from<THREADS>(upto, place >= distance ? place - distance : 0);
    reduce(folded, upto);
    if (place >= distance) upto = folded;
  }
  const T neighbor = shuffle_from<THREADS>(upto, place > 0 ? place - 1 : 0);
  T before = carry;
  if constexpr (THREADS <= 32) {
    reduce(carry, shuffle_from<THREADS>(upto, WIDTH - 1));
  } else {
    SHARED(T, slots, THREADS / 32);
    if (place == 31) slots[THREAD / 32] = upto;
    BARRIER();
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; warp++) {
      if (warp == THREAD / 32) before = carry;
      reduce(carry, slots[warp]);
    }
    BARRIER();
  }
  if (place > 0) reduce(before, neighbor);
#pragma unroll
  for (int l = 0; l < LANES; l++) {
    T folded = before;
    reduce(folded, values[l]);
    values[l] = folded;
  }
}

// Whether any lane of a run goes on.
template <int LANES>
DEVICE bool any_lane(const int* live, int count) {
  int any = 0;
#pragma unroll
  for (int l = 0; l < LANES; l++)
    any |= l < count ? live[l] : 0;
  return any != 0;
}

// True in the one block that finishes last of `blocks`; the others' writes are visible to it. The counter wraps to zero.
DEVICE bool is_last_block(unsigned* counter, unsigned blocks) {
  SHARED(bool, last, 1);
  __threadfence();
  BARRIER();
  if (threadIdx.x == 0) last[0] = atomicInc(counter, blocks - 1) == blocks - 1;
  BARRIER();
  __threadfence();
  return last[0];
}

// Calls body(row, column) for every cell of a tile of rows x COLUMNS, or of fewer columns.
template <int THREADS, int COLUMNS, class Body>
DEVICE void for_cells(int rows, int columns, Body body) {
  for (int cell = THREAD; cell < rows * COLUMNS; cell += THREADS)
    if (cell % COLUMNS < columns) body(cell / COLUMNS, cell % COLUMNS);
}

// The updates in [at, at + ROUND) that have a row, in order, as row * ROUND + (update - at) in `list`; returns how many.
// Between two calls is a barrier of the caller.
template <int THREADS, int ROUND, class Index, class Row>
DEVICE int list_updates(Index at, Index end, Row row_of, SCRATCH(unsigned) list, SCRATCH(int) counts) {
  constexpr int EACH = ROUND / THREADS, WARPS = THREADS / 32;
  const int lane = THREAD % 32, warp = THREAD / 32;
  int rows[EACH];
  int total = 0;
#pragma unroll
  for (int k = 0; k < EACH; k++) {
    const Index update = at + (warp * EACH + k) * 32 + lane;
    rows[k] = update < end ? row_of(update) : -1;
  }
#pragma unroll
  for (int k = 0; k < EACH; k++) total += __popc(__ballot_sync(0xffffffffu, rows[k] >= 0));
  if (lane == 0) counts[warp] = total;
  BARRIER();
  int place = 0, size = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    if (w < warp) place += counts[w];
    size += counts[w];
  }
#pragma unroll
  for (int k = 0; k < EACH; k++) {
    const unsigned found = __ballot_sync(0xffffffffu, rows[k] >= 0);
    if (rows[k] >= 0)
      list[place + __popc(found & ((1u << lane) - 1))] = (unsigned)rows[k] * ROUND + (warp * EACH + k) * 32 + lane;
    place += __popc(found);
  }
  BARRIER();
  return size;
}

// Calls fold_row(update, row) for every update in [begin, end) that has a row. A warp owns every WARPS-th row, and of
// its 32 updates those of one row take turns: the updates of a row come in order.
template <int THREADS, int ROUND, class Index, class Row, class FoldRow>
DEVICE void for_updates(Index begin, Index end, Row row_of, FoldRow fold_row) {
  constexpr int WARPS = THREADS / 32;
  SHARED(unsigned, list, ROUND);
  SHARED(int, counts, WARPS);
  const int lane = THREAD % 32, warp = THREAD / 32;
  for (Index at = begin; at < end; at += ROUND) {
    const int size = list_updates<THREADS, ROUND>(at, end, row_of, list, counts);
    for (int first = 0; first < size; first += 32) {
      const unsigned entry = first + lane < size ? list[first + lane] : 0u;
      const int row = first + lane < size ? (int)(entry / ROUND) : -1;
      const bool mine = row >= 0 && row % WARPS == warp;
      const unsigned owned = __ballot_sync(0xffffffffu, mine);
      if (owned == 0) continue;
      const unsigned same = __match_any_sync(0xffffffffu, mine ? row : -1 - lane);
      const int turn = mine ? __popc(same & ((1u << lane) - 1)) : -1;
      for (int now = 0; __any_sync(0xffffffffu, turn >= now); now++) {
        if (turn == now) fold_row(at + (Index)(entry % ROUND), row);
        __syncwarp();
      }
    }
  }
}

// The same, and fold(row, column, read(update, column)) for every column: the warps that own a row have its columns side
// by side.
template <int THREADS, int ROUND, int COLUMNS, class Index, class Row, class FoldRow, class Read, class Fold>
DEVICE void for_wide_updates(Index begin, Index end, int columns, Row row_of, FoldRow fold_row, Read read, Fold fold) {
  constexpr int WARPS = THREADS / 32, GROUPS = (COLUMNS + 31) / 32;
  constexpr int ACROSS = GROUPS >= 8 ? 8 : GROUPS >= 4 ? 4 : GROUPS >= 2 ? 2 : 1, DOWN = WARPS / ACROSS, TOGETHER = 4;
  SHARED(unsigned, list, ROUND);
  SHARED(int, counts, WARPS);
  const int lane = THREAD % 32, warp = THREAD / 32;
  for (Index at = begin; at < end; at += ROUND) {
    const int size = list_updates<THREADS, ROUND>(at, end, row_of, list, counts);
    for (int first = 0; first < size; first += 32) {
      const unsigned entry = first + lane < size ? list[first + lane] : 0u;
      const bool mine = first + lane < size && (int)(entry / ROUND) % DOWN == warp / ACROSS;
      unsigned owned = __ballot_sync(0xffffffffu, mine);
      while (owned != 0) {
        unsigned entries[TOGETHER];
        int count = 0;
#pragma unroll
        for (int k = 0; k < TOGETHER; k++) {
          entries[k] = __shfl_sync(0xffffffffu, entry, owned ? __ffs(owned) - 1 : 0);
          count += owned != 0;
          owned &= owned - 1;
        }
        if (warp % ACROSS == 0 && lane == 0)
          for (int k = 0; k < TOGETHER; k++)
            if (k < count) fold_row(at + (Index)(entries[k] % ROUND), (int)(entries[k] / ROUND));
        for (int column = warp % ACROSS * 32 + lane; column < columns; column += 32 * ACROSS) {
          decltype(read(at, column)) values[TOGETHER];
#pragma unroll
          for (int k = 0; k < TOGETHER; k++)
            if (k < count) values[k] = read(at + (Index)(entries[k] % ROUND), column);
#pragma unroll
          for (int k = 0; k < TOGETHER; k++)
            if (k < count) fold((int)(entries[k] / ROUND), column, values[k]);
        }
      }
    }
  }
}
