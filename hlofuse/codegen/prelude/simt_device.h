// The CUDA language for a C++ compiler on the CPU: what block_cuda.h, cuda.h and kernels use of it. No headers.
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define HERE int line = __builtin_LINE(), const char *file = __builtin_FILE()

namespace simt {

static const Machine* machine;

constexpr bool in_prelude(const char* file) {
  while (file[0] && file[1]) file++;
  return file[0] == 'h';
}

// A copy of one of the machine's registers, read anew at each use.
template <int WHICH>
struct Place {
  operator unsigned() const { return machine->place(WHICH); }
};
struct One {
  operator unsigned() const { return 1; }
};
struct Zero {
  operator unsigned() const { return 0; }
};
template <int WHICH, class Rest>
struct Dimensions {
  Place<WHICH> x;
  Rest y, z;
};

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

// A value of up to 64 bits as the machine passes it around.
template <class T>
inline unsigned long long packed(T value) {
  static_assert(sizeof(T) <= 8, "a shuffle moves up to 64 bits");
  unsigned long long bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  return bits;
}
template <class T>
inline T unpacked(unsigned long long bits) {
  T value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

inline unsigned long long wait(Wait what, unsigned mask, unsigned long long value, int operand, int width, int line,
                               const char* file) {
  return machine->wait(what, mask, value, operand, width, Site{file, line, 0});
}

}  // namespace simt

static const simt::Dimensions<0, simt::Zero> threadIdx{};
static const simt::Dimensions<1, simt::Zero> blockIdx{};
static const simt::Dimensions<2, simt::One> blockDim{};
static const simt::Dimensions<3, simt::One> gridDim{};
static const int warpSize = 32;

// --- waiting for other threads ---

inline void __syncthreads(HERE) { simt::wait(simt::SYNC_THREADS, 0, 0, 0, 0, line, file); }
inline int __syncthreads_or(int value, HERE) {
  return (int)simt::wait(simt::SYNC_THREADS_OR, 0, value != 0, 0, 0, line, file);
}
inline int __syncthreads_and(int value, HERE) {
  return (int)simt::wait(simt::SYNC_THREADS_AND, 0, value != 0, 0, 0, line, file);
}
inline int __syncthreads_count(int value, HERE) {
  return (int)simt::wait(simt::SYNC_THREADS_COUNT, 0, value != 0, 0, 0, line, file);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, HERE) { simt::wait(simt::SYNC_WARP, mask, 0, 0, 0, line, file); }
template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, HERE) {
  return simt::unpacked<T>(simt::wait(simt::SHUFFLE_INDEX, mask, simt::packed(value), lane, width, line, file));
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32, HERE) {
  return simt::unpacked<T>(simt::wait(simt::SHUFFLE_UP, mask, simt::packed(value), (int)distance, width, line, file));
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32, HERE) {
  return simt::unpacked<T>(simt::wait(simt::SHUFFLE_DOWN, mask, simt::packed(value), (int)distance, width, line, file));
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, HERE) {
  return simt::unpacked<T>(simt::wait(simt::SHUFFLE_XOR, mask, simt::packed(value), bits, width, line, file));
}
inline unsigned __ballot_sync(unsigned mask, int value, HERE) {
  return (unsigned)simt::wait(simt::BALLOT, mask, value != 0, 0, 0, line, file);
}
inline int __any_sync(unsigned mask, int value, HERE) {
  return (int)simt::wait(simt::ANY, mask, value != 0, 0, 0, line, file);
}
inline int __all_sync(unsigned mask, int value, HERE) {
  return (int)simt::wait(simt::ALL, mask, value != 0, 0, 0, line, file);
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value, HERE) {
  return (unsigned)simt::wait(simt::MATCH_ANY, mask, simt::packed(value), 0, 0, line, file);
}
#define SIMT_REDUCE(name, what, type)                                                        \
  inline type name(unsigned mask, type value, HERE) {                                        \
    return (type)(unsigned)simt::wait(what, mask, (unsigned)value, 0, 0, line, file);        \
  }
SIMT_REDUCE(__reduce_add_sync, simt::REDUCE_ADD, unsigned)
SIMT_REDUCE(__reduce_add_sync, simt::REDUCE_ADD, int)
SIMT_REDUCE(__reduce_min_sync, simt::REDUCE_MIN, unsigned)
SIMT_REDUCE(__reduce_min_sync, simt::REDUCE_MIN_SIGNED, int)
SIMT_REDUCE(__reduce_max_sync, simt::REDUCE_MAX, unsigned)
SIMT_REDUCE(__reduce_max_sync, simt::REDUCE_MAX_SIGNED, int)
SIMT_REDUCE(__reduce_and_sync, simt::REDUCE_AND, unsigned)
SIMT_REDUCE(__reduce_or_sync, simt::REDUCE_OR, unsigned)
SIMT_REDUCE(__reduce_xor_sync, simt::REDUCE_XOR, unsigned)
#undef SIMT_REDUCE
inline unsigned __activemask() { return simt::machine->active_lanes(); }
inline void __threadfence() { simt::machine->fence(); }
inline void __threadfence_block() {}
inline void __threadfence_system() { simt::machine->fence(); }
inline void __nanosleep(unsigned) {}

// --- bits ---

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz((unsigned)x); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll((unsigned long long)x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned y = 0;
  for (int k = 0; k < 32; k++) y |= (x >> k & 1u) << (31 - k);
  return y;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline unsigned __float_as_uint(float x) { return simt::bits_as<unsigned>(x); }
inline int __float_as_int(float x) { return simt::bits_as<int>(x); }
inline float __uint_as_float(unsigned x) { return simt::bits_as<float>(x); }
inline float __int_as_float(int x) { return simt::bits_as<float>(x); }
inline long long __double_as_longlong(double x) { return simt::bits_as<long long>(x); }
inline double __longlong_as_double(long long x) { return simt::bits_as<double>(x); }
inline unsigned __double2loint(double x) { return (unsigned)simt::bits_as<unsigned long long>(x); }
inline unsigned __double2hiint(double x) { return (unsigned)(simt::bits_as<unsigned long long>(x) >> 32); }

// --- arithmetic: CUDA's functions of these names, in libm's words ---

extern "C" int printf(const char*, ...);
#define SIMT_MATH_1(name) extern "C" double name(double); extern "C" float name##f(float);
#define SIMT_MATH_2(name) extern "C" double name(double, double); extern "C" float name##f(float, float);
SIMT_MATH_1(fabs) SIMT_MATH_1(floor) SIMT_MATH_1(ceil) SIMT_MATH_1(trunc) SIMT_MATH_1(rint) SIMT_MATH_1(sqrt)
SIMT_MATH_1(exp) SIMT_MATH_1(exp2) SIMT_MATH_1(log) SIMT_MATH_1(log2) SIMT_MATH_1(log10) SIMT_MATH_1(expm1)
SIMT_MATH_1(log1p) SIMT_MATH_1(sin) SIMT_MATH_1(cos) SIMT_MATH_1(tan) SIMT_MATH_1(sinh) SIMT_MATH_1(cosh)
SIMT_MATH_1(tanh) SIMT_MATH_1(asin) SIMT_MATH_1(acos) SIMT_MATH_1(atan) SIMT_MATH_1(asinh) SIMT_MATH_1(acosh)
SIMT_MATH_1(atanh) SIMT_MATH_1(cbrt) SIMT_MATH_1(erf) SIMT_MATH_1(erfc) SIMT_MATH_1(lgamma) SIMT_MATH_1(tgamma)
SIMT_MATH_2(copysign) SIMT_MATH_2(fmod) SIMT_MATH_2(atan2) SIMT_MATH_2(pow) SIMT_MATH_2(hypot) SIMT_MATH_2(nextafter)
#undef SIMT_MATH_1
#undef SIMT_MATH_2
extern "C" double fma(double, double, double);
extern "C" float fmaf(float, float, float);
extern "C" double ldexp(double, int);
extern "C" float ldexpf(float, int);
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
// The larger of -0 and +0 is +0, and a number is larger than NaN.
#define SIMT_EXTREMES(type, bits, max, min)                                                                     \
  inline type max(type a, type b) {                                                                             \
    return a != a ? b : b != b ? a : a == b ? simt::bits_as<type>(simt::bits_as<bits>(a) & simt::bits_as<bits>(b)) \
                                            : a > b ? a : b;                                                    \
  }                                                                                                             \
  inline type min(type a, type b) {                                                                             \
    return a != a ? b : b != b ? a : a == b ? simt::bits_as<type>(simt::bits_as<bits>(a) | simt::bits_as<bits>(b)) \
                                            : a < b ? a : b;                                                    \
  }
SIMT_EXTREMES(float, unsigned, simt_fmaxf, simt_fminf)
SIMT_EXTREMES(double, unsigned long long, simt_fmax, simt_fmin)
#undef SIMT_EXTREMES
#define fmaxf simt_fmaxf
#define fminf simt_fminf
#define fmax simt_fmax
#define fmin simt_fmin

// To the nearest f16, ties to even, as its 16 bits; and back.
inline float f16_value(unsigned short bits) {
  const unsigned exponent = bits >> 10 & 31u, fraction = bits & 0x3ffu;
  const float size = exponent == 31   ? (fraction ? __builtin_nanf("") : __builtin_inff())
                     : exponent == 0 ? (float)fraction * 0x1p-24f
                                     : __uint_as_float((exponent + 112u) << 23 | fraction << 13);
  return bits & 0x8000u ? -size : size;
}
inline unsigned short f16_bits(float x) {
  const unsigned u = __float_as_uint(x), sign = u >> 16 & 0x8000u, size = u & 0x7fffffffu;
  if (size > 0x7f800000u) return (unsigned short)(sign | 0x7e00u);
  if (size >= 0x477ff000u) return (unsigned short)(sign | 0x7c00u);
  // In units of the last place that an f16 of this size has; the sum rounds, a carry goes into the exponent.
  if (size < 0x38800000u) return (unsigned short)(sign | (unsigned)rintf(__uint_as_float(size) * 0x1p24f));
  return (unsigned short)(sign | ((size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13));
}
