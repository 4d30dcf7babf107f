// HLO's scalar operations where C's operators mean something else. The same text in every dialect, after the dialect's
// own header. Overloads go by type; a function does what the HLO operation of its name does, for every input.
typedef signed char s8;
typedef short s16;
typedef int s32;
typedef long long s64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// How the 16-bit floats lie in memory. They are computed in float: to_float on load, round_* after each operation, and
// pack_* (of a float that the type can represent) on store; to_* rounds and packs.
struct bf16 { u16 bits; };
struct f16 { u16 bits; };
SCALAR float to_float(bf16 x) { return float_of_bits((u32)x.bits << 16); }
SCALAR float to_float(f16 x) { return f16_value(x.bits); }
// A double in one rounding: the float between is rounded to odd, which keeps the side of a tie that it lies on.
SCALAR float round_f16(double x) {
  const float nearest = (float)x;
  const u32 toward_zero = bits_of(nearest) - (abs_of((double)nearest) > abs_of(x) ? 1u : 0u);
  return round_f16(x == x ? float_of_bits(toward_zero | ((double)nearest != x ? 1u : 0u)) : NAN_F);
}
SCALAR bf16 pack_bf16(float x) { return bf16{(u16)(bits_of(x) >> 16)}; }
SCALAR f16 pack_f16(float x) { return f16{f16_bits(x)}; }
SCALAR bf16 to_bf16(float x) { return pack_bf16(round_bf16(x)); }
SCALAR f16 to_f16(float x) { return pack_f16(round_f16(x)); }

// --- integers: wrap around, never trap ---

template <typename T> struct integer_facts;  // the unsigned and signed types of one width, and the extreme values
template <> struct integer_facts<s8> { typedef u8 plain; typedef s8 with_sign; };
template <> struct integer_facts<u8> { typedef u8 plain; typedef s8 with_sign; };
template <> struct integer_facts<s16> { typedef u16 plain; typedef s16 with_sign; };
template <> struct integer_facts<u16> { typedef u16 plain; typedef s16 with_sign; };
template <> struct integer_facts<s32> { typedef u32 plain; typedef s32 with_sign; };
template <> struct integer_facts<u32> { typedef u32 plain; typedef s32 with_sign; };
template <> struct integer_facts<s64> { typedef u64 plain; typedef s64 with_sign; };
template <> struct integer_facts<u64> { typedef u64 plain; typedef s64 with_sign; };

template <typename T> SCALAR constexpr bool is_signed_type() { return (T)-1 < (T)0; }
template <typename T> SCALAR constexpr u32 width_of() { return 8 * sizeof(T); }
template <typename T> SCALAR constexpr T lowest_of() {
  return is_signed_type<T>() ? (T)((typename integer_facts<T>::plain)1 << (width_of<T>() - 1)) : (T)0;
}
template <typename T> SCALAR constexpr T highest_of() { return (T)~lowest_of<T>(); }

// Unsigned arithmetic wraps; narrow types are computed in 32 bits, unsigned too (u16 * u16 would overflow an int).
template <bool WIDE> struct arithmetic_type { typedef u32 type; };
template <> struct arithmetic_type<true> { typedef u64 type; };
template <typename T> SCALAR auto wrapping(T x) { return (typename arithmetic_type<(sizeof(T) > 4)>::type)x; }

template <typename T> SCALAR T wrap_add(T a, T b) { return (T)(wrapping(a) + wrapping(b)); }
template <typename T> SCALAR T wrap_sub(T a, T b) { return (T)(wrapping(a) - wrapping(b)); }
template <typename T> SCALAR T wrap_mul(T a, T b) { return (T)(wrapping(a) * wrapping(b)); }
template <typename T> SCALAR T wrap_neg(T a) { return (T)(0u - wrapping(a)); }
template <typename T> SCALAR T int_max(T a, T b) { return a > b ? a : b; }
template <typename T> SCALAR T int_min(T a, T b) { return a < b ? a : b; }
template <typename T> SCALAR T clamp_int(T low, T x, T high) { return int_min(int_max(x, low), high); }
template <typename T> SCALAR T abs_of(T x) { return x < (T)0 ? wrap_neg(x) : x; }
template <typename T> SCALAR T sign_of(T x) { return (T)((x > (T)0) - (x < (T)0)); }

// x / 0 has all bits set (-1), the lowest value / -1 is itself; x % 0 is x, the lowest value % -1 is 0.
template <typename T> SCALAR T safe_divisor(T a, T b) {
  const bool overflows = is_signed_type<T>() && a == lowest_of<T>() && b == (T)-1;
  return b == (T)0 || overflows ? (T)1 : b;
}
template <typename T> SCALAR T int_div(T a, T b) { return b == (T)0 ? (T)-1 : quotient(a, safe_divisor(a, b)); }
template <typename T> SCALAR T int_rem(T a, T b) {
  const T divisor = safe_divisor(a, b);
  return b == (T)0 ? a : (T)(a - quotient(a, divisor) * divisor);
}

// A negative exponent gives 0, but for the bases 1 and -1.
template <typename T> SCALAR T int_pow(T base, T exponent) {
  auto result = wrapping((T)1), square = wrapping(base);
  for (typename integer_facts<T>::plain e = (typename integer_facts<T>::plain)exponent; e != 0; e >>= 1) {
    if (e & 1) result *= square;
    square *= square;
  }
  if (exponent < (T)0 && base != (T)1 && base != (T)-1) return (T)0;
  return (T)result;
}

// The amount is unsigned; amounts from the width on shift everything out.
template <typename T> SCALAR u32 shift_amount(T b) { return (u32)b & (width_of<T>() - 1); }
template <typename T> SCALAR bool shifts_out(T b) { return (typename integer_facts<T>::plain)b >= width_of<T>(); }
template <typename T> SCALAR T shift_left(T a, T b) {
  return shifts_out(b) ? (T)0 : (T)(wrapping(a) << shift_amount(b));
}
template <typename T> SCALAR T shift_right_logical(T a, T b) {
  return shifts_out(b) ? (T)0 : (T)((typename integer_facts<T>::plain)a >> shift_amount(b));
}
template <typename T> SCALAR T shift_right_signed(T a, T b) {
  return (T)((typename integer_facts<T>::with_sign)a >> (shifts_out(b) ? width_of<T>() - 1 : shift_amount(b)));
}

template <typename T> SCALAR auto zero_extended(T x) { return wrapping((typename integer_facts<T>::plain)x); }
template <typename T> SCALAR T popcount(T x) { return (T)popcount_bits(zero_extended(x)); }
template <typename T> SCALAR T leading_zeros(T x) {
  return (T)(leading_zero_bits(zero_extended(x)) - (sizeof(T) < 4 ? 32 - (int)width_of<T>() : 0));
}

// --- floats ---

SCALAR bool is_finite(float x) { return abs_of(x) < INF_F; }
SCALAR bool is_finite(double x) { return abs_of(x) < INF_D; }
SCALAR float sign_of(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x; }  // of a zero or NaN: itself
SCALAR double sign_of(double x) { return x > 0.0 ? 1.0 : x < 0.0 ? -1.0 : x; }
SCALAR float clamp_nan(float low, float x, float high) { return min_nan(max_nan(x, low), high); }
SCALAR double clamp_nan(double low, double x, double high) { return min_nan(max_nan(x, low), high); }

template <typename F> SCALAR F round_half_away(F x) {
  const F whole = truncate(x);
  return copy_sign(abs_of(x - whole) >= (F)0.5 ? abs_of(whole) + (F)1 : abs_of(whole), x);
}
SCALAR float round_away(float x) { return round_half_away(x); }
SCALAR double round_away(double x) { return round_half_away(x); }

// The position of x among all floats: -NaN < -inf < ... < -0 < +0 < ... < inf < NaN.
SCALAR s32 total_order(float x) { const s32 i = (s32)bits_of(x); return i ^ (s32)((u32)(i >> 31) >> 1); }
SCALAR s64 total_order(double x) { const s64 i = (s64)bits_of(x); return i ^ (s64)((u64)(i >> 63) >> 1); }

// Toward zero; beyond the type's range its extreme value, for NaN 0.
template <typename T, typename F> SCALAR T saturated(F x) {
  const F below = (F)lowest_of<T>(), beyond = (F)2 * (F)(highest_of<T>() / 2 + 1);
  const bool small = x < below, large = x >= beyond;
  const T inside = (T)(small || large || x != x ? (F)0 : x);
  return large ? highest_of<T>() : small ? lowest_of<T>() : inside;
}
template <typename T, typename F> SCALAR T rounded_to_zero(F x) {
  // Small types by way of s32: compilers make no vectors of choices between values narrower than what decides.
  if constexpr (sizeof(T) >= 4) return saturated<T>(x);
  const s32 whole = saturated<s32>(x), low = (s32)lowest_of<T>(), high = (s32)highest_of<T>();
  const s32 raised = whole < low ? low : whole;
  return (T)(raised > high ? high : raised);
}
template <typename T> SCALAR T to_int(float x) { return rounded_to_zero<T>(x); }
template <typename T> SCALAR T to_int(double x) { return rounded_to_zero<T>(x); }

// Rounds to a mantissa of MANTISSA bits, then overflows to infinity and flushes to zero as EXPONENT bits do.
template <int EXPONENT, int MANTISSA> SCALAR float reduce_precision(float x) {
  u32 u = bits_of(x);
  if (MANTISSA < 23) {
    const u32 dropped = 23 - (MANTISSA < 23 ? MANTISSA : 22), last = (u >> dropped) & 1u;
    u = (u + ((1u << (dropped - 1)) - 1u) + last) & ~((1u << dropped) - 1u);
  }
  if (EXPONENT < 8) {
    const u32 bias = (1u << (EXPONENT < 8 ? EXPONENT - 1 : 7)) - 1u, exponent = u & 0x7f800000u, sign = u & 0x80000000u;
    u = exponent > (127u + bias) << 23 ? sign | 0x7f800000u : exponent <= (127u - bias) << 23 ? sign : u;
  }
  return x != x ? x : float_of_bits(u);
}
template <int EXPONENT, int MANTISSA> SCALAR double reduce_precision(double x) {
  u64 u = bits_of(x);
  if (MANTISSA < 52) {
    const u64 dropped = 52 - (MANTISSA < 52 ? MANTISSA : 51), last = (u >> dropped) & 1u;
    u = (u + ((1ull << (dropped - 1)) - 1ull) + last) & ~((1ull << dropped) - 1ull);
  }
  if (EXPONENT < 11) {
    const u64 bias = (1ull << (EXPONENT < 11 ? EXPONENT - 1 : 10)) - 1ull;
    const u64 exponent = u & 0x7ff0000000000000ull, sign = u & 0x8000000000000000ull;
    u = exponent > (1023ull + bias) << 52 ? sign | 0x7ff0000000000000ull : exponent <= (1023ull - bias) << 52 ? sign : u;
  }
  return x != x ? x : double_of_bits(u);
}

// --- complex numbers ---

struct c64 { float re, im; };
struct c128 { double re, im; };
template <typename F> struct complex_of;
template <> struct complex_of<float> { typedef c64 type; };
template <> struct complex_of<double> { typedef c128 type; };

SCALAR c64 make_complex(float re, float im) { return c64{re, im}; }
SCALAR c128 make_complex(double re, double im) { return c128{re, im}; }
SCALAR float real_of(float x) { return x; }
SCALAR double real_of(double x) { return x; }
SCALAR float imag_of(float) { return 0.0f; }
SCALAR double imag_of(double) { return 0.0; }

// Each function is written once for a complex type C with parts F, and then named for both.
#define COMPLEX_FUNCTIONS(C, F)                                                                                        \
  SCALAR F real_of(C z) { return z.re; }                                                                               \
  SCALAR F imag_of(C z) { return z.im; }                                                                               \
  SCALAR C operator+(C a, C b) { return C{a.re + b.re, a.im + b.im}; }                                                 \
  SCALAR C operator-(C a, C b) { return C{a.re - b.re, a.im - b.im}; }                                                 \
  SCALAR C operator-(C a) { return C{-a.re, -a.im}; }                                                                  \
  SCALAR C operator*(C a, C b) { return C{a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re}; }                     \
  SCALAR C operator*(F s, C a) { return C{s * a.re, s * a.im}; }                                                       \
  SCALAR bool operator==(C a, C b) { return a.re == b.re && a.im == b.im; }                                            \
  SCALAR bool operator!=(C a, C b) { return a.re != b.re || a.im != b.im; }                                            \
  SCALAR F abs_of(C z) { return hypot_of(z.re, z.im); }                                                                \
  /* Smith's: the quotient of the divisor's parts keeps squares from overflowing. */                                   \
  SCALAR C operator/(C a, C b) {                                                                                       \
    const bool flat = abs_of(b.re) >= abs_of(b.im);                                                                    \
    const F big = flat ? b.re : b.im, small = flat ? b.im : b.re;                                                      \
    const F ratio = small / big, scale = big + small * ratio;                                                          \
    const F re = flat ? a.re + a.im * ratio : a.re * ratio + a.im;                                                     \
    const F im = flat ? a.im - a.re * ratio : a.im * ratio - a.re;                                                     \
    const bool zero = b.re == (F)0 && b.im == (F)0;                                                                    \
    return C{(zero ? a.re : re) / (zero ? abs_of(b.re) : scale), (zero ? a.im : im) / (zero ? abs_of(b.re) : scale)};  \
  }                                                                                                                    \
  SCALAR C sign_of(C z) {                                                                                              \
    const F size = abs_of(z);                                                                                          \
    return size == (F)0 ? C{(F)0, (F)0} : C{z.re / size, z.im / size};                                                 \
  }                                                                                                                    \
  SCALAR C exp_of(C z) {                                                                                               \
    const F half = exp_of((F)0.5 * z.re); /* twice the half: exp(x) alone overflows where exp(x) sin(y) does not */    \
    const F scale = z.im == (F)0 ? (F)1 : half; /* exp(inf) times a zero is that zero */                               \
    return C{half * cos_of(z.im) * half, scale * sin_of(z.im) * scale};                                                \
  }                                                                                                                    \
  /* Near the unit circle the logarithm of |z| is that of 1 + (|z|^2 - 1), without forming the sum. */                  \
  SCALAR C log_of(C z) {                                                                                               \
    const F big = abs_of(z.re) > abs_of(z.im) ? abs_of(z.re) : abs_of(z.im), size = abs_of(z);                         \
    const F small = abs_of(z.re) > abs_of(z.im) ? abs_of(z.im) : abs_of(z.re);                                         \
    const bool near = size > (F)0.5 && size < (F)1.5;                                                                  \
    const F re = near ? (F)0.5 * log1p_of((big - (F)1) * (big + (F)1) + small * small) : log_of(size);                 \
    return C{re, atan2_of(z.im, z.re)};                                                                                \
  }                                                                                                                    \
  SCALAR C log1p_of(C z) {                                                                                             \
    const F size = hypot_of((F)1 + z.re, z.im);                                                                        \
    const bool near = size > (F)0.5 && size < (F)1.5;                                                                  \
    const F re = near ? (F)0.5 * log1p_of(z.re * ((F)2 + z.re) + z.im * z.im) : log_of(size);                          \
    return C{re, atan2_of(z.im, (F)1 + z.re)};                                                                         \
  }                                                                                                                    \
  SCALAR C expm1_of(C z) {                                                                                             \
    const F grown = expm1_of(z.re), half = sin_of((F)0.5 * z.im);                                                      \
    const F scale = z.im == (F)0 ? (F)1 : grown + (F)1;                                                                \
    return C{grown * cos_of(z.im) - (F)2 * half * half, scale * sin_of(z.im)};                                         \
  }                                                                                                                    \
  SCALAR C sqrt_of(C z) {                                                                                              \
    const F t = sqrt_of((F)0.5 * abs_of(z.re) + (F)0.5 * abs_of(z)), other = z.im / (t + t);                           \
    if (t == (F)0) return C{(F)0, z.im};                                                                               \
    if (!is_finite(z.im) && z.im == z.im) return C{abs_of(z.im), z.im};                                                \
    return z.re >= (F)0 ? C{t, other} : C{abs_of(other), copy_sign(t, z.im)};                                          \
  }                                                                                                                    \
  SCALAR C rsqrt_of(C z) { return C{(F)1, (F)0} / sqrt_of(z); }                                                        \
  SCALAR C sin_of(C z) { return C{sin_of(z.re) * cosh_of(z.im), cos_of(z.re) * sinh_of(z.im)}; }                       \
  SCALAR C cos_of(C z) { return C{cos_of(z.re) * cosh_of(z.im), -(sin_of(z.re) * sinh_of(z.im))}; }                    \
  SCALAR C sinh_of(C z) { return C{sinh_of(z.re) * cos_of(z.im), cosh_of(z.re) * sin_of(z.im)}; }                      \
  SCALAR C cosh_of(C z) { return C{cosh_of(z.re) * cos_of(z.im), sinh_of(z.re) * sin_of(z.im)}; }                      \
  /* Kahan's, in terms of tan(y) and sinh(x); beyond |x| = 20 the real part is 1 to the last bit. */                   \
  SCALAR C tanh_of(C z) {                                                                                              \
    if (abs_of(z.re) > (F)20) {                                                                                        \
      const F decay = exp_of(-abs_of(z.re));                                                                           \
      return C{copy_sign((F)1, z.re), (F)4 * sin_of(z.im) * cos_of(z.im) * decay * decay};                             \
    }                                                                                                                  \
    const F t = tan_of(z.im), s = sinh_of(z.re), beta = (F)1 + t * t, denominator = (F)1 + beta * s * s;               \
    return C{beta * sqrt_of((F)1 + s * s) * s / denominator, t / denominator};                                         \
  }                                                                                                                    \
  SCALAR C tan_of(C z) { const C w = tanh_of(C{-z.im, z.re}); return C{w.im, -w.re}; }                                 \
  SCALAR C logistic(C z) { return C{(F)1, (F)0} / (C{(F)1, (F)0} + exp_of(-z)); }                                      \
  SCALAR C float_pow(C x, C y) {                                                                                       \
    if (x == C{(F)0, (F)0}) return y == C{(F)0, (F)0} ? C{(F)1, (F)0} : C{(F)0, (F)0};                                 \
    return exp_of(y * log_of(x));                                                                                      \
  }
COMPLEX_FUNCTIONS(c64, float)
COMPLEX_FUNCTIONS(c128, double)
#undef COMPLEX_FUNCTIONS

// Functions whose text is long, for kernels with many calls: on the GPU each is then compiled once and called, because
// four hundred sines written out take ptxas a minute. On the CPU they are the same, for calls have no vectors.
#define CALLED(name)                                                        \
  template <typename T> CALL T call_##name(T x) { return name(x); }
CALLED(sin_of) CALLED(cos_of) CALLED(tan_of)
CALLED(asin_of) CALLED(acos_of) CALLED(atan_of) CALLED(sinh_of) CALLED(cosh_of)
CALLED(asinh_of) CALLED(acosh_of) CALLED(atanh_of) CALLED(erf_of) CALLED(expm1_of) CALLED(log1p_of) CALLED(cbrt_of)
#undef CALLED
template <typename T> CALL T call_float_pow(T x, T y) { return float_pow(x, y); }
template <typename T> CALL T call_atan2_of(T y, T x) { return atan2_of(y, x); }
