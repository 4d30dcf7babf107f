// Scalar functions of the HOST dialect: what scalar.h needs from the machine. Everything inlines and everything in a hot
// loop is free of branches, so that the compiler turns a loop over it into vectors. No headers are included.
#define SCALAR static inline __attribute__((always_inline))
#define CALL SCALAR

#define INF_F __builtin_inff()
#define NAN_F __builtin_nanf("")
#define INF_D __builtin_inf()
#define NAN_D __builtin_nan("")

SCALAR unsigned bits_of(float x) { unsigned u; __builtin_memcpy(&u, &x, 4); return u; }
SCALAR float float_of_bits(unsigned u) { float x; __builtin_memcpy(&x, &u, 4); return x; }
SCALAR unsigned long long bits_of(double x) { unsigned long long u; __builtin_memcpy(&u, &x, 8); return u; }
SCALAR double double_of_bits(unsigned long long u) { double x; __builtin_memcpy(&x, &u, 8); return x; }

// a * b + c; in one rounding where the machine has the instruction.
#ifdef __FMA__
SCALAR float mul_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
SCALAR double mul_add(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
SCALAR float mul_add(float a, float b, float c) { return a * b + c; }
SCALAR double mul_add(double a, double b, double c) { return a * b + c; }
#endif

// libm. With the attribute the compiler calls glibc's vector versions (libmvec) from loops; those beyond the first set
// need glibc 2.35, which whoever defines HLOFUSE_VECTOR_MATH as 1 has checked.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define VECTOR_LIBM extern "C" __attribute__((simd("notinbranch"), const, nothrow))
#else
#define VECTOR_LIBM extern "C"
#endif
#if HLOFUSE_VECTOR_MATH
#define VECTOR_LIBM_2_35 VECTOR_LIBM
#else
#define VECTOR_LIBM_2_35 extern "C"
#endif
VECTOR_LIBM float sinf(float);
VECTOR_LIBM double sin(double);
VECTOR_LIBM float cosf(float);
VECTOR_LIBM double cos(double);
VECTOR_LIBM double exp(double);
VECTOR_LIBM double log(double);
VECTOR_LIBM float powf(float, float);
VECTOR_LIBM double pow(double, double);
VECTOR_LIBM_2_35 float expm1f(float);
VECTOR_LIBM_2_35 double expm1(double);
VECTOR_LIBM_2_35 float log1pf(float);
VECTOR_LIBM_2_35 double log1p(double);
VECTOR_LIBM_2_35 float tanf(float);
VECTOR_LIBM_2_35 double tan(double);
VECTOR_LIBM_2_35 double tanh(double);
VECTOR_LIBM_2_35 float sinhf(float);
VECTOR_LIBM_2_35 double sinh(double);
VECTOR_LIBM_2_35 float coshf(float);
VECTOR_LIBM_2_35 double cosh(double);
VECTOR_LIBM_2_35 float asinf(float);
VECTOR_LIBM_2_35 double asin(double);
VECTOR_LIBM_2_35 float acosf(float);
VECTOR_LIBM_2_35 double acos(double);
VECTOR_LIBM_2_35 float asinhf(float);
VECTOR_LIBM_2_35 double asinh(double);
VECTOR_LIBM_2_35 float acoshf(float);
VECTOR_LIBM_2_35 double acosh(double);
VECTOR_LIBM_2_35 float atanhf(float);
VECTOR_LIBM_2_35 double atanh(double);
VECTOR_LIBM_2_35 float atan2f(float, float);
VECTOR_LIBM_2_35 double atan2(double, double);
VECTOR_LIBM_2_35 float cbrtf(float);
VECTOR_LIBM_2_35 double cbrt(double);
VECTOR_LIBM_2_35 float erff(float);
VECTOR_LIBM_2_35 double erf(double);
VECTOR_LIBM_2_35 double hypot(double, double);
extern "C" float fmodf(float, float);
extern "C" double fmod(double, double);

SCALAR float abs_of(float x) { return __builtin_fabsf(x); }
SCALAR double abs_of(double x) { return __builtin_fabs(x); }
SCALAR float copy_sign(float x, float sign) { return __builtin_copysignf(x, sign); }
SCALAR double copy_sign(double x, double sign) { return __builtin_copysign(x, sign); }
SCALAR float floor_of(float x) { return __builtin_floorf(x); }
SCALAR double floor_of(double x) { return __builtin_floor(x); }
SCALAR float ceil_of(float x) { return __builtin_ceilf(x); }
SCALAR double ceil_of(double x) { return __builtin_ceil(x); }
SCALAR float truncate(float x) { return __builtin_truncf(x); }
SCALAR double truncate(double x) { return __builtin_trunc(x); }
SCALAR float round_even(float x) { return __builtin_rintf(x); }
SCALAR double round_even(double x) { return __builtin_rint(x); }
SCALAR float sqrt_of(float x) { return __builtin_sqrtf(x); }
SCALAR double sqrt_of(double x) { return __builtin_sqrt(x); }
SCALAR float rsqrt_of(float x) { return 1.0f / __builtin_sqrtf(x); }
SCALAR double rsqrt_of(double x) { return 1.0 / __builtin_sqrt(x); }
SCALAR float float_rem(float a, float b) { return fmodf(a, b); }
SCALAR double float_rem(double a, double b) { return fmod(a, b); }

SCALAR float max_nan(float a, float b) {
  float larger = a > b ? a : b;  // b where one is NaN or both are equal
  larger = a == b ? float_of_bits(bits_of(a) & bits_of(b)) : larger;  // +0 is larger than -0
  return a != a ? a : larger;
}
SCALAR double max_nan(double a, double b) {
  double larger = a > b ? a : b;
  larger = a == b ? double_of_bits(bits_of(a) & bits_of(b)) : larger;
  return a != a ? a : larger;
}
SCALAR float min_nan(float a, float b) {
  float smaller = a < b ? a : b;
  smaller = a == b ? float_of_bits(bits_of(a) | bits_of(b)) : smaller;
  return a != a ? a : smaller;
}
SCALAR double min_nan(double a, double b) {
  double smaller = a < b ? a : b;
  smaller = a == b ? double_of_bits(bits_of(a) | bits_of(b)) : smaller;
  return a != a ? a : smaller;
}

// a / b, where that is defined. There are vector instructions for doubles, whose quotient of 32-bit integers is exact as
// far as its whole part goes.
template <typename T> SCALAR T quotient(T a, T b) {
  if constexpr (sizeof(T) <= 4) return (T)((double)a / (double)b);
  return (T)(a / b);
}

// exp(x) = 2^n e^r with |r| <= log(2)/2 and a minimax polynomial for (e^r - 1 - r) / r^2; about 1 ulp with fma. 2^n is
// an addition to the exponent, which is right as long as the result is a normal number; smaller ones are 0, as XLA's.
SCALAR float exp_of(float x) {
  const float shifted = mul_add(x, 1.44269502f, 12582912.0f);  // 1.5 * 2^23: the low bits of the sum are n
  const float n = shifted - 12582912.0f;
  const float r = mul_add(n, 2.12194440e-4f, mul_add(n, -0.693359375f, x));
  float p = mul_add(r, 0.0013814220437780023f, 0.00836889911442995f);
  p = mul_add(p, r, 0.04166840761899948f);
  p = mul_add(p, r, 0.1666651964187622f);
  p = mul_add(p, r, 0.4999999403953552f);
  p = mul_add(p * r, r, r) + 1.0f;
  float y = float_of_bits(bits_of(p) + (bits_of(shifted) << 23));
  y = x < 88.7228394f ? y : x + INF_F;  // NaN stays NaN
  return x < -87.3365402f ? 0.0f : y;
}
SCALAR double exp_of(double x) { return exp(x); }

// log(x) = e log(2) + log(1 + f) with sqrt(1/2) <= 1 + f < sqrt(2) and a minimax polynomial for the terms from f^3 on.
SCALAR float log_of(float x) {
  const bool tiny = x < 1.17549435e-38f;
  const float scaled = tiny ? x * 8388608.0f : x;
  const unsigned above = bits_of(scaled) - 0x3f3504f3u;
  const float e = (float)((int)above >> 23) - (tiny ? 23.0f : 0.0f);
  const float f = float_of_bits((above & 0x7fffffu) + 0x3f3504f3u) - 1.0f;
  float p = mul_add(f, 0.06748314946889877f, -0.11677888035774231f);
  p = mul_add(p, f, 0.11888649314641953f);
  p = mul_add(p, f, -0.12405277788639069f);
  p = mul_add(p, f, 0.14219450950622559f);
  p = mul_add(p, f, -0.16668008267879486f);
  p = mul_add(p, f, 0.20002123713493347f);
  p = mul_add(p, f, -0.25000008940696716f);
  p = mul_add(p, f, 0.3333331346511841f);
  const float ff = f * f;
  float y = mul_add(ff * f, p, e * -2.12194440e-4f);
  y = mul_add(ff, -0.5f, y) + f;
  y = mul_add(e, 0.693359375f, y);
  y = x == INF_F ? x : y;
  y = x == 0.0f ? -INF_F : y;
  return x >= 0.0f ? y : NAN_F;
}
SCALAR double log_of(double x) { return log(x); }

// Near zero a polynomial, elsewhere 1 - 2 / (exp(2 |x|) + 1).
SCALAR float tanh_of(float x) {
  const float a = abs_of(x), s = x * x;
  float p = mul_add(s, 0.002142957178875804f, -0.008177393116056919f);
  p = mul_add(p, s, 0.021700700744986534f);
  p = mul_add(p, s, -0.05394676327705383f);
  p = mul_add(p, s, 0.1333320587873459f);
  p = mul_add(p, s, -0.3333333134651184f);
  const float inner = mul_add(p * s, a, a), outer = 1.0f - 2.0f / (exp_of(a + a) + 1.0f);
  return copy_sign(a < 0.625f ? inner : outer, x);
}
SCALAR double tanh_of(double x) { return tanh(x); }
SCALAR float logistic(float x) { return 1.0f / (1.0f + exp_of(-x)); }
SCALAR double logistic(double x) { return 1.0 / (1.0 + exp_of(-x)); }

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
// Both are scaled by a power of two near the larger, so that squares neither overflow nor vanish; within 1.5 ulp.
SCALAR float hypot_of(float x, float y) {
  const unsigned a = bits_of(x) & 0x7f800000u, b = bits_of(y) & 0x7f800000u;
  unsigned exponent = a > b ? a : b;
  exponent = exponent < 0x00800000u ? 0x00800000u : exponent > 0x7e800000u ? 0x7e800000u : exponent;
  const float scale = float_of_bits(0x7f000000u - exponent), u = x * scale, v = y * scale;
  return __builtin_sqrtf(mul_add(u, u, v * v)) * float_of_bits(exponent);
}
SCALAR double hypot_of(double x, double y) { return hypot(x, y); }

SCALAR int popcount_bits(unsigned x) { return __builtin_popcount(x); }
SCALAR int popcount_bits(unsigned long long x) { return __builtin_popcountll(x); }
SCALAR int leading_zero_bits(unsigned x) { return x == 0 ? 32 : __builtin_clz(x); }
SCALAR int leading_zero_bits(unsigned long long x) { return x == 0 ? 64 : __builtin_clzll(x); }

// bf16 and f16 are computed in float; rounding and conversion are integer work (_Float16 would be scalar).
SCALAR float round_bf16(float x) {
  const unsigned u = bits_of(x);
  return x != x ? NAN_F : float_of_bits((u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u);
}
SCALAR float round_f16(float x) {
  const unsigned u = bits_of(x), magnitude = u & 0x7fffffffu;
  const float normal = float_of_bits((magnitude + 0xfffu + ((u >> 13) & 1u)) & 0xffffe000u);
  const float tiny = (float_of_bits(magnitude) + 0.5f) - 0.5f;  // 2^-24, f16's smallest step, is 0.5f's
  float y = magnitude < 0x38800000u ? tiny : normal;
  y = magnitude >= 0x477ff000u ? INF_F : y;
  y = x != x ? NAN_F : y;
  return copy_sign(y, x);
}
// The 16 bits of an f16 from a float that it can represent, and back; subnormals too, whatever the thread flushes. The
// choices are masks: g++ makes no vectors of conditional expressions whose halves are 16 and 32 bits wide.
SCALAR unsigned blend(bool test, unsigned yes, unsigned no) {
  const unsigned mask = 0u - (unsigned)test;
  return (yes & mask) | (no & ~mask);
}
SCALAR unsigned short f16_bits(float x) {
  const unsigned u = bits_of(x), magnitude = u & 0x7fffffffu;
  const unsigned normal = (magnitude - 0x38000000u) >> 13;
  const unsigned tiny = bits_of(float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
  unsigned h = blend(magnitude < 0x38800000u, tiny, normal);
  h = blend(magnitude >= 0x47800000u, 0x7c00u, h);
  h = blend(magnitude > 0x7f800000u, 0x7e00u, h);
  return (unsigned short)(h | ((u >> 16) & 0x8000u));
}
SCALAR float f16_value(unsigned short bits) {
  const unsigned h = bits, magnitude = h & 0x7fffu;
  const unsigned normal = (magnitude << 13) + 0x38000000u;
  const unsigned tiny = bits_of(float_of_bits(0x3f000000u + magnitude) - 0.5f);
  unsigned y = blend(magnitude < 0x400u, tiny, normal);
  y = blend(magnitude >= 0x7c00u, 0x7f800000u | (magnitude << 13), y);
  return float_of_bits(y | ((h & 0x8000u) << 16));
}
