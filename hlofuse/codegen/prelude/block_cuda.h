// What a block is on the GPU: THREADS threads, each with LANES neighboring elements.
#define INLINE
#define DEVICE static __device__ __forceinline__
#define RESTRICT __restrict__
#define IN(T) const T* RESTRICT
#define OUT(T) T* RESTRICT
#define SCRATCH(T) T*
#define SHARED(T, name, size) __shared__ T name[size]
#define BARRIER() __syncthreads()
#define THREAD ((int)threadIdx.x)
#define FOR_LANES(l, count) _Pragma("unroll") for (int l = 0; l < LANES; l++) if (l < (count))

// Calls body(start, count) for each run of LANES indices in [begin, end) that is this thread's.
template <int THREADS, int LANES, class Index, class Body>
DEVICE void for_tiles(Index begin, Index end, Body body) {
  for (Index at = begin + THREAD * LANES; at < end; at += THREADS * LANES)
    body(at, end - at < LANES ? (int)(end - at) : LANES);
}

// The same where each run's place in the thread's registers is wanted too: body(start, count, slot).
template <int THREADS, int LANES, int STEPS, class Index, class Body>
DEVICE void for_kept_tiles(Index end, Body body) {
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    const Index at = (step * THREADS + THREAD) * LANES;
    if (at < end) body(at, end - at < LANES ? (int)(end - at) : LANES, step * LANES);
  }
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

template <class T>
DEVICE T shuffle_down(T value, int distance) {
  if constexpr (sizeof(T) <= 4) {
    union { unsigned bits; T value; } word;
    word.bits = 0;
    word.value = value;
    word.bits = __shfl_down_sync(0xffffffffu, word.bits, distance);
    return word.value;
  } else {
    union { unsigned bits[sizeof(T) / 4]; T value; } words;
    words.value = value;
    for (int k = 0; k < (int)(sizeof(T) / 4); k++)
      words.bits[k] = __shfl_down_sync(0xffffffffu, words.bits[k], distance);
    return words.value;
  }
}

// Folds over the threads of the block in a fixed tree; afterwards every thread has the result.
template <int THREADS, class Reduce, class A>
DEVICE void fold_threads(Reduce reduce, A& a) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    if (distance < THREADS) reduce(a, shuffle_down(a, distance));
  SHARED(A, slots, 32);
  if (THREAD % 32 == 0) slots[THREAD / 32] = a;
  BARRIER();
  a = slots[0];
#pragma unroll
  for (int warp = 1; warp < (THREADS + 31) / 32; warp++) reduce(a, slots[warp]);
  BARRIER();
}

template <int THREADS, class Reduce, class A, class B>
DEVICE void fold_threads(Reduce reduce, A& a, B& b) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    if (distance < THREADS) reduce(a, b, shuffle_down(a, distance), shuffle_down(b, distance));
  SHARED(A, slots_a, 32);
  SHARED(B, slots_b, 32);
  if (THREAD % 32 == 0) {
    slots_a[THREAD / 32] = a;
    slots_b[THREAD / 32] = b;
  }
  BARRIER();
  a = slots_a[0];
  b = slots_b[0];
#pragma unroll
  for (int warp = 1; warp < (THREADS + 31) / 32; warp++) reduce(a, b, slots_a[warp], slots_b[warp]);
  BARRIER();
}

// True in the one block that finishes last of `blocks`; the others' writes are visible to it. The counter wraps to zero.
DEVICE bool is_last_block(unsigned* counter, unsigned blocks) {
  SHARED(bool, last, 1);
  __threadfence();
  BARRIER();
  if (THREAD == 0) last[0] = atomicInc(counter, blocks - 1) == blocks - 1;
  BARRIER();
  __threadfence();
  return last[0];
}
