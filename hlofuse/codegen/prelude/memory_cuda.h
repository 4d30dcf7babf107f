// How a kernel spells memory on the GPU. simt_memory.h has the same names with every access checked.
#define RESTRICT __restrict__
#define IN(T) const T* RESTRICT
#define OUT(T) T* RESTRICT
#define SCRATCH(T) T*
#define SHARED(T, name, size) __shared__ T name[size]

// A vector of neighboring elements, from `at` on, in one access; `at` is a multiple of their number.
template <class Vector, class T, class Index>
static __device__ __forceinline__ Vector load_vector(const T* x, Index at) {
  return *(const Vector*)(x + at);
}
template <class Vector, class T, class Index>
static __device__ __forceinline__ void store_vector(T* x, Index at, const Vector& vector) {
  *(Vector*)(x + at) = vector;
}
