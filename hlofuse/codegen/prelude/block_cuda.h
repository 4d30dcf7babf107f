// What a block is on the GPU: THREADS threads, each with LANES neighboring elements. SIMT executes this very text: memory
// is only touched in the ways of memory_cuda.h.
#define INLINE
#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define BARRIER() __syncthreads()
typedef int BlockIndex;
#define THREAD ((int)threadIdx.x % THREADS)  // several groups of THREADS may share a block, each with its own BLOCK
#define FOR_LANES(l, count) _Pragma("unroll") for (int l = 0; l < LANES; l++) if (l < (count))

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

// Folds over THREADS threads in a fixed tree; afterwards every thread has the result. Up to a warp needs no barrier, so
// that several such groups may share a block.
template <int THREADS, class Reduce, class A>
DEVICE void fold_threads(Reduce reduce, A& a) {
#pragma unroll
  for (int distance = (THREADS < 32 ? THREADS : 32) / 2; distance > 0; distance /= 2)
    reduce(a, shuffle<THREADS, false>(a, distance));
  if constexpr (THREADS <= 32) {
    a = shuffle<THREADS, true>(a, 0);
  } else {
    SHARED(A, slots, THREADS / 32);
    if (THREAD % 32 == 0) slots[THREAD / 32] = a;
    BARRIER();
    a = slots[0];
#pragma unroll
    for (int warp = 1; warp < THREADS / 32; warp++) reduce(a, slots[warp]);
    BARRIER();
  }
}

template <int THREADS, class Reduce, class A, class B>
DEVICE void fold_threads(Reduce reduce, A& a, B& b) {
#pragma unroll
  for (int distance = (THREADS < 32 ? THREADS : 32) / 2; distance > 0; distance /= 2)
    reduce(a, b, shuffle<THREADS, false>(a, distance), shuffle<THREADS, false>(b, distance));
  if constexpr (THREADS <= 32) {
    a = shuffle<THREADS, true>(a, 0);
    b = shuffle<THREADS, true>(b, 0);
  } else {
    SHARED(A, slots_a, THREADS / 32);
    SHARED(B, slots_b, THREADS / 32);
    if (THREAD % 32 == 0) {
      slots_a[THREAD / 32] = a;
      slots_b[THREAD / 32] = b;
    }
    BARRIER();
    a = slots_a[0];
    b = slots_b[0];
#pragma unroll
    for (int warp = 1; warp < THREADS / 32; warp++) reduce(a, b, slots_a[warp], slots_b[warp]);
    BARRIER();
  }
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
