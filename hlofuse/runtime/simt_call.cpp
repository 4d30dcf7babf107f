// The FFI handler through which XLA:CPU calls kernels under SIMT: finds a kernel by its 64-bit key, as shim.c does, hands
// its buffers to the machine (simt_machine.cpp, which stands before this text), and makes a report XLA's error.
#include <stdint.h>

#include "xla/ffi/api/c_api.h"

namespace {

struct Kernel {
  uint64_t key;
  simt::Entry* entry;
  const char *name, *text, *kinds;  // kept by Python for as long as the process lives
  const char* const* names;
  int64_t blocks, counters;
  int threads, count;
  const Kernel* before;
};

const Kernel* kernels;
uint64_t seed;

XLA_FFI_Error* make_error(const XLA_FFI_Api* api, XLA_FFI_Error_Code code, const char* message) {
  XLA_FFI_Error_Create_Args args = {};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = message;
  args.errc = code;
  return api->XLA_FFI_Error_Create(&args);
}

int element_bytes(XLA_FFI_DataType type) {
  switch (type) {
    case XLA_FFI_DataType_PRED: case XLA_FFI_DataType_S8: case XLA_FFI_DataType_U8: return 1;
    case XLA_FFI_DataType_S16: case XLA_FFI_DataType_U16: case XLA_FFI_DataType_F16: case XLA_FFI_DataType_BF16: return 2;
    case XLA_FFI_DataType_S64: case XLA_FFI_DataType_U64: case XLA_FFI_DataType_F64: case XLA_FFI_DataType_C64: return 8;
    case XLA_FFI_DataType_C128: return 16;
    default: return 4;
  }
}

simt::Region region_of(const XLA_FFI_Buffer* buffer, const char* name) {
  const int element = element_bytes(buffer->dtype);
  long long bytes = element;
  for (int64_t d = 0; d < buffer->rank; d++) bytes *= buffer->dims[d];
  return simt::Region{name, (char*)buffer->data, bytes, element, false, nullptr};
}

const Kernel* find_kernel(const XLA_FFI_CallFrame* frame) {
  for (int64_t i = 0; i < frame->attrs.size; i++) {
    if (frame->attrs.types[i] != XLA_FFI_AttrType_SCALAR) continue;
    const uint64_t key = *(const uint64_t*)((const XLA_FFI_Scalar*)frame->attrs.attrs[i])->value;
    for (const Kernel* k = __atomic_load_n(&kernels, __ATOMIC_ACQUIRE); k; k = k->before)
      if (k->key == key) return k;
  }
  return nullptr;
}

}  // namespace

extern "C" void hlofuse_simt_seed(uint64_t value) { __atomic_store_n(&seed, value, __ATOMIC_RELAXED); }

// 0: done; 1: no memory. `kinds` and `names` are of the kernel's arguments in their order, the counters last.
extern "C" int hlofuse_simt_register(uint64_t key, void* entry, const char* name, const char* text, const char* kinds,
                                     const char* const* names, int count, int64_t blocks, int threads,
                                     int64_t counters) {
  Kernel* added = (Kernel*)malloc(sizeof(Kernel));
  if (!added) return 1;
  *added = Kernel{key, (simt::Entry*)entry, name, text, kinds, names, blocks, counters, threads, count, nullptr};
  added->before = __atomic_load_n(&kernels, __ATOMIC_ACQUIRE);
  const Kernel* whole = added;
  while (!__atomic_compare_exchange_n(&kernels, &added->before, whole, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
  }
  return 0;
}

extern "C" XLA_FFI_Error* hlofuse_simt_call(XLA_FFI_CallFrame* frame) {
  if (frame->extension_start && frame->extension_start->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata* metadata = ((XLA_FFI_Metadata_Extension*)frame->extension_start)->metadata;
    metadata->api_version.major_version = 0;
    metadata->api_version.minor_version = 1;
    metadata->traits = 0;
    return nullptr;
  }
  const Kernel* k = find_kernel(frame);
  if (!k)
    return make_error(frame->api, XLA_FFI_Error_Code_NOT_FOUND,
                      "hlofuse: a SIMT kernel is not loaded in this process; trace the function again");
  if (frame->args.size + frame->rets.size + 1 != k->count)
    return make_error(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT, "hlofuse: a SIMT kernel has other arguments");
  simt::Region* regions = (simt::Region*)calloc((size_t)k->count, sizeof(simt::Region));
  unsigned* counters = (unsigned*)calloc((size_t)k->counters + 1, sizeof(unsigned));
  int n = 0;
  for (int64_t i = 0; i < frame->args.size; i++, n++)
    regions[n] = region_of((const XLA_FFI_Buffer*)frame->args.args[i], k->names[n]);
  for (int64_t i = 0; i < frame->rets.size; i++, n++) {
    regions[n] = region_of((const XLA_FFI_Buffer*)frame->rets.rets[i], k->names[n]);
    memset(regions[n].base, 0xff, (size_t)regions[n].bytes);  // what was there before must not look right
  }
  regions[n] = simt::Region{k->names[n], (char*)counters, (long long)(k->counters * sizeof(unsigned)),
                            (int)sizeof(unsigned), true, nullptr};
  char text[simt::REPORT] = "hlofuse: SIMT: ";
  const int prefix = (int)strlen(text);
  const int failed = hlofuse_simt_run(k->entry, k->name, k->text, k->blocks, k->threads, regions, k->count, k->kinds,
                                      __atomic_load_n(&seed, __ATOMIC_RELAXED), 0, k->blocks, text + prefix,
                                      (int)sizeof text - prefix);
  free(counters);
  free(regions);
  return failed ? make_error(frame->api, XLA_FFI_Error_Code_FAILED_PRECONDITION, text) : nullptr;
}
