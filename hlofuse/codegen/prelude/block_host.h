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

// True in the one block that finishes last of `blocks`; the others' writes are visible to it.
DEVICE bool is_last_block(unsigned* counter, unsigned blocks) {
  return __atomic_add_fetch(counter, 1u, __ATOMIC_ACQ_REL) == blocks;
}
