// The names of memory_cuda.h where every access is checked: pointers know their array, and an index the line it stands in.
#define RESTRICT
#define IN(T) simt::Pointer<const T>
#define OUT(T) simt::Pointer<T>
#define SCRATCH(T) simt::Pointer<T>
#define SHARED(T, name, size)     \
  static char name##_id;           \
  const simt::Pointer<T> name(simt::shared<T>(&name##_id, #name, size))

namespace simt {

template <class T> struct Plain { typedef T type; };
template <class T> struct Plain<const T> { typedef T type; };

// An index, and the line that made it.
struct At {
  long long index;
  int line;
  const char* file;
  At(long long index, HERE) : index(index), line(line), file(file) {}
};

// One element that may be written: reads where a value is wanted.
template <class T>
struct Element {
  Region* region;
  T* place;
  Site site;
  operator T() const {
    touch(READ);
    return *place;
  }
  T operator=(T value) const {
    touch(WRITE);
    return *place = value;
  }
  T operator=(const Element& other) const { return *this = (T)other; }
  template <class U> T operator+=(U value) const { return *this = (T)((T)*this + value); }
  template <class U> T operator-=(U value) const { return *this = (T)((T)*this - value); }
  template <class U> T operator*=(U value) const { return *this = (T)((T)*this * value); }
  template <class U> T operator|=(U value) const { return *this = (T)((T)*this | value); }
  template <class U> T operator&=(U value) const { return *this = (T)((T)*this & value); }
  template <class U> T operator^=(U value) const { return *this = (T)((T)*this ^ value); }
  T operator++(int) const {
    const T before = *this;
    *this = (T)(before + 1);
    return before;
  }
  T operator++() const { return *this += 1; }

 private:
  void touch(Access access) const {
    machine->touch(region, (const char*)place - region->base, sizeof(T), access, site);
  }
};

template <class T>
struct Pointer {
  typedef typename Plain<T>::type Value;
  Region* region;
  T* place;
  int from;  // the kernel's line that handed the pointer to a function of the prelude

  explicit Pointer(Region* region) : region(region), place((T*)region->base), from(0) {}
  Pointer(Region* region, T* place, int from) : region(region), place(place), from(from) {}
  Pointer(const Pointer& other, HERE)
      : region(other.region), place(other.place), from(in_prelude(file) ? other.from : line) {}
  Pointer& operator=(const Pointer&) = default;
  operator Pointer<const Value>() const { return Pointer<const Value>(region, place, from); }

  template <class Index>
  Pointer operator+(Index offset) const { return Pointer(region, place + offset, from); }

  auto operator[](At at) const { return read_or_name(at, (T*)nullptr); }

  template <class Vector>
  Vector load(At at) const {
    Vector vector;
    check_vector<Vector>(at, READ);
    __builtin_memcpy((void*)&vector, (const void*)(place + at.index), sizeof vector);
    return vector;
  }
  template <class Vector>
  void store(At at, const Vector& vector) const {
    check_vector<Vector>(at, WRITE);
    __builtin_memcpy((void*)(place + at.index), (const void*)&vector, sizeof vector);
  }
  Site site(At at) const { return Site{at.file, at.line, from}; }

 private:
  Value read_or_name(At at, const Value*) const {
    const long long offset = (const char*)(place + at.index) - region->base;
    if (region->shadow || offset < 0 || offset + (long long)sizeof(T) > region->bytes)
      machine->touch(region, offset, sizeof(T), READ, site(at));
    return place[at.index];
  }
  Element<Value> read_or_name(At at, Value*) const { return Element<Value>{region, place + at.index, site(at)}; }
  template <class Vector>
  void check_vector(At at, Access access) const {
    const long long offset = (const char*)(place + at.index) - region->base;
    if (offset % alignof(Vector)) machine->misaligned(region, offset, alignof(Vector), site(at));
    machine->touch(region, offset, sizeof(Vector), access, site(at));
  }
};

template <class T>
inline Pointer<T> shared(const void* declaration, const char* name, long long size, HERE) {
  return Pointer<T>(machine->shared(declaration, name, size * (long long)sizeof(T), sizeof(T), Site{file, line, 0}));
}

// A kernel's parameters from the launch's buffers.
template <class P> struct Parameter;
template <class T> struct Parameter<Pointer<T>> { static Pointer<T> of(Region* r) { return Pointer<T>(r); } };
template <class T> struct Parameter<T*> { static T* of(Region* r) { return (T*)r->base; } };

template <class... P> struct Parameters {};
template <class... Done, class... Values>
inline void call(void (*kernel)(Done...), Parameters<>, Region*, const Values&... values) { kernel(values...); }
template <class... All, class First, class... Rest, class... Values>
inline void call(void (*kernel)(All...), Parameters<First, Rest...>, Region* next, const Values&... values) {
  call(kernel, Parameters<Rest...>(), next + 1, values..., Parameter<First>::of(next));
}
template <class... P>
inline void enter(void (*kernel)(P...), const Machine* with, Region* buffers) {
  machine = with;
  call(kernel, Parameters<P...>(), buffers);
}

}  // namespace simt

// The templates of scalar.h, of elements: a template does not see that an element is a value.
#define SIMT_UNARY(name) \
  template <class T>     \
  inline T name(const simt::Element<T>& a) { return name((T)a); }
#define SIMT_BINARY(name)                                                                          \
  template <class T>                                                                               \
  inline T name(const simt::Element<T>& a, const simt::Element<T>& b) { return name((T)a, (T)b); } \
  template <class T>                                                                               \
  inline T name(const simt::Element<T>& a, typename simt::Plain<T>::type b) { return name((T)a, b); } \
  template <class T>                                                                               \
  inline T name(typename simt::Plain<T>::type a, const simt::Element<T>& b) { return name(a, (T)b); }
SIMT_UNARY(wrap_neg) SIMT_UNARY(abs_of) SIMT_UNARY(sign_of) SIMT_UNARY(popcount) SIMT_UNARY(leading_zeros)
SIMT_BINARY(wrap_add) SIMT_BINARY(wrap_sub) SIMT_BINARY(wrap_mul) SIMT_BINARY(int_max) SIMT_BINARY(int_min)
SIMT_BINARY(int_div) SIMT_BINARY(int_rem) SIMT_BINARY(int_pow) SIMT_BINARY(shift_left)
SIMT_BINARY(shift_right_logical) SIMT_BINARY(shift_right_signed)
#undef SIMT_UNARY
#undef SIMT_BINARY

#define SIMT_ENTRY(kernel) \
  extern "C" void kernel##_simt(const simt::Machine* machine, simt::Region* buffers) { simt::enter(kernel, machine, buffers); }

template <class Vector, class T, class Index>
inline Vector load_vector(const simt::Pointer<T>& x, Index at) { return x.template load<Vector>(at); }
template <class Vector, class T, class Index>
inline void store_vector(const simt::Pointer<T>& x, Index at, const Vector& vector) { x.store(at, vector); }

// --- atomics: one after the other, as blocks and threads run in any order but one at a time ---

#define SIMT_ATOMIC(name, new_value)                                                                     \
  template <class T>                                                                                     \
  inline T name(T* at, typename simt::Plain<T>::type value, HERE) {                                      \
    simt::machine->touch_address(at, sizeof(T), simt::ATOMIC, simt::Site{file, line, 0});                \
    const T old = *at;                                                                                   \
    *at = (T)(new_value);                                                                                \
    return old;                                                                                          \
  }                                                                                                      \
  template <class T>                                                                                     \
  inline T name(const simt::Pointer<T>& at, typename simt::Plain<T>::type value, HERE) {                 \
    simt::machine->touch(at.region, (char*)at.place - at.region->base, sizeof(T), simt::ATOMIC,          \
                         simt::Site{file, line, at.from});                                               \
    const T old = *at.place;                                                                             \
    *at.place = (T)(new_value);                                                                          \
    return old;                                                                                          \
  }
SIMT_ATOMIC(atomicAdd, old + value)
SIMT_ATOMIC(atomicSub, old - value)
SIMT_ATOMIC(atomicExch, value)
SIMT_ATOMIC(atomicMax, old > value ? old : value)
SIMT_ATOMIC(atomicMin, old < value ? old : value)
SIMT_ATOMIC(atomicAnd, old & value)
SIMT_ATOMIC(atomicOr, old | value)
SIMT_ATOMIC(atomicXor, old ^ value)
SIMT_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
SIMT_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
#undef SIMT_ATOMIC
template <class T>
inline T atomicCAS(T* at, typename simt::Plain<T>::type expected, typename simt::Plain<T>::type value, HERE) {
  const T old = atomicAdd(at, (T)0, line, file);
  if (old == expected) *at = value;
  return old;
}
template <class T>
inline T atomicCAS(const simt::Pointer<T>& at, typename simt::Plain<T>::type expected,
                   typename simt::Plain<T>::type value, HERE) {
  const T old = atomicAdd(at, (T)0, line, file);
  if (old == expected) *at.place = value;
  return old;
}
template <class T>
inline T __ldg(const T* at) { return *at; }
template <class T>
inline typename simt::Plain<T>::type __ldg(const simt::Pointer<T>& at, HERE) { return at[simt::At(0, line, file)]; }
