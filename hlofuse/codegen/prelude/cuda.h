// Scalar functions of the CUDA dialect: what scalar.h needs from the machine, as NVRTC has it without any header.
#define SCALAR static __device__ __forceinline__
#define CALL static __device__ __noinline__

SCALAR unsigned bits_of(float x) { return __float_as_uint(x); }
SCALAR float float_of_bits(unsigned u) { return __uint_as_float(u); }
SCALAR unsigned long long bits_of(double x) { return (unsigned long long)__double_as_longlong(x); }
SCALAR double double_of_bits(unsigned long long u) { return __longlong_as_double((long long)u); }

#define INF_F __int_as_float(0x7f800000)
#define NAN_F __int_as_float(0x7fc00000)
#define INF_D __longlong_as_double(0x7ff0000000000000ll)
#define NAN_D __longlong_as_double(0x7ff8000000000000ll)

SCALAR float abs_of(float x) { return fabsf(x); }
SCALAR double abs_of(double x) { return fabs(x); }
SCALAR float copy_sign(float x, float sign) { return copysignf(x, sign); }
SCALAR double copy_sign(double x, double sign) { return copysign(x, sign); }
SCALAR float floor_of(float x) { return floorf(x); }
SCALAR double floor_of(double x) { return floor(x); }
SCALAR float ceil_of(float x) { return ceilf(x); }
SCALAR double ceil_of(double x) { return ceil(x); }
SCALAR float truncate(float x) { return truncf(x); }
SCALAR double truncate(double x) { return trunc(x); }
SCALAR float round_even(float x) { return rintf(x); }
SCALAR double round_even(double x) { return rint(x); }
SCALAR float sqrt_of(float x) { return sqrtf(x); }
SCALAR double sqrt_of(double x) { return sqrt(x); }
SCALAR float rsqrt_of(float x) { return rsqrtf(x); }
SCALAR float mul_add(float a, float b, float c) { return fmaf(a, b, c); }
SCALAR double mul_add(double a, double b, double c) { return fma(a, b, c); }
SCALAR double rsqrt_of(double x) { return rsqrt(x); }
SCALAR float float_rem(float a, float b) { return fmodf(a, b); }
SCALAR double float_rem(double a, double b) { return fmod(a, b); }

#if __CUDA_ARCH__ >= 800
SCALAR float max_nan(float a, float b) { float y; asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b)); return y; }
SCALAR float min_nan(float a, float b) { float y; asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b)); return y; }
#else
SCALAR float max_nan(float a, float b) { return a != a ? a : b != b ? b : fmaxf(a, b); }
SCALAR float min_nan(float a, float b) { return a != a ? a : b != b ? b : fminf(a, b); }
#endif
SCALAR double max_nan(double a, double b) { return a != a ? a : b != b ? b : fmax(a, b); }
SCALAR double min_nan(double a, double b) { return a != a ? a : b != b ? b : fmin(a, b); }

template <typename T> SCALAR T quotient(T a, T b) { return (T)(a / b); }
SCALAR float exp_of(float x) { return expf(x); }
SCALAR double exp_of(double x) { return exp(x); }
SCALAR float log_of(float x) { return logf(x); }
SCALAR double log_of(double x) { return log(x); }
SCALAR float tanh_of(float x) { return tanhf(x); }
SCALAR double tanh_of(double x) { return tanh(x); }
SCALAR float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }
SCALAR double logistic(double x) { return 1.0 / (1.0 + exp(-x)); }
SCALAR float expm1_of(float x) { return expm1f(x); }
SCALAR double expm1_of(double x) { return expm1(x); }
SCALAR float log1p_of(float x) { return log1pf(x); }
SCALAR double log1p_of(double x) { return log1p(x); }
SCALAR float sin_of(float x) { return sinf(x); }
SCALAR double sin_of(double x) { return sin(x); }
SCALAR float cos_of(float x) { return cosf(x); }
SCALAR double cos_of(double x) { return cos(x); }
SCALAR float tan_of(float x) { return tanf(x); }
SCALAR double tan_of(double x) { return tan(x); }
SCALAR float sinh_of(float x) { return sinhf(x); }
SCALAR double sinh_of(double x) { return sinh(x); }
SCALAR float cosh_of(float x) { return coshf(x); }
SCALAR double cosh_of(double x) { return cosh(x); }
SCALAR float asin_of(float x) { return asinf(x); }
SCALAR double asin_of(double x) { return asin(x); }
SCALAR float acos_of(float x) { return acosf(x); }
SCALAR double acos_of(double x) { return acos(x); }
SCALAR float asinh_of(float x) { return asinhf(x); }
SCALAR double asinh_of(double x) { return asinh(x); }
SCALAR float acosh_of(float x) { return acoshf(x); }
SCALAR double acosh_of(double x) { return acosh(x); }
SCALAR float atanh_of(float x) { return atanhf(x); }
SCALAR double atanh_of(double x) { return atanh(x); }
SCALAR float atan2_of(float y, float x) { return atan2f(y, x); }
SCALAR double atan2_of(double y, double x) { return atan2(y, x); }
SCALAR float cbrt_of(float x) { return cbrtf(x); }
SCALAR double cbrt_of(double x) { return cbrt(x); }
SCALAR float erf_of(float x) { return erff(x); }
SCALAR double erf_of(double x) { return erf(x); }
SCALAR float float_pow(float x, float y) { return powf(x, y); }
SCALAR double float_pow(double x, double y) { return pow(x, y); }
SCALAR float hypot_of(float x, float y) { return hypotf(x, y); }
SCALAR double hypot_of(double x, double y) { return hypot(x, y); }

SCALAR int popcount_bits(unsigned x) { return __popc(x); }
SCALAR int popcount_bits(unsigned long long x) { return __popcll(x); }
SCALAR int leading_zero_bits(unsigned x) { return __clz(x); }
SCALAR int leading_zero_bits(unsigned long long x) { return __clzll(x); }

SCALAR float round_bf16(float x) {
#if __CUDA_ARCH__ >= 800
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return __uint_as_float((unsigned)bits << 16);
#else
  const unsigned u = __float_as_uint(x);
  return x != x ? NAN_F : __uint_as_float((u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u);
#endif
}
#ifdef __CUDA_ARCH__  // simt_device.h has its own
SCALAR unsigned short f16_bits(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
SCALAR float f16_value(unsigned short bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
#endif
SCALAR float round_f16(float x) { return f16_value(f16_bits(x)); }
