/* The FFI handlers through which XLA calls every generated kernel: one on the CPU, one on CUDA.
 *
 * A call carries the kernel's 64-bit hash, never an address: XLA may keep the compiled program on disk and run it in
 * another process. The hash is looked up in a table that Python fills before a program is built.
 *
 * Blocks of a call are spread over XLA's own thread pool. The caller takes blocks too, and waits only for blocks that
 * another thread has taken, so a pool whose threads are all busy (or are all callers) delays a call but cannot stop it.
 *
 * On CUDA a call is a launch on XLA's stream, and nothing else that a graph could not hold; Python has loaded the kernel.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include "xla/ffi/api/c_api.h"

typedef void (*Kernel)(void** buffers, long long begin, long long end, unsigned* counters);

/* ---- The table: open addressing, written under Python's lock, read without one. ---- */

typedef struct {
  _Atomic(Kernel) kernel; /* NULL: the slot is free. Published last, so that a reader sees the rest. A CUkernel too. */
  uint64_t key;
  int64_t blocks;
  int64_t grain; /* blocks per task; on CUDA threads per block */
  int64_t counters;
  int64_t shared; /* bytes of shared memory that a launch asks for */
} Entry;

typedef struct {
  uint64_t mask;
  Entry entries[];
} Table;

static _Atomic(Table*) table;
static uint64_t table_used;

static Entry* find_slot(Table* in, uint64_t key) {
  for (uint64_t i = key;; ++i) {
    Entry* entry = &in->entries[i & in->mask];
    if (!atomic_load_explicit(&entry->kernel, memory_order_acquire) || entry->key == key) return entry;
  }
}

static void fill_slot(Entry* slot, const Entry* from) {
  slot->key = from->key;
  slot->blocks = from->blocks;
  slot->grain = from->grain;
  slot->counters = from->counters;
  slot->shared = from->shared;
  atomic_store_explicit(&slot->kernel, atomic_load(&from->kernel), memory_order_release);
}

/* At least half of the slots stay free. A table that was outgrown is kept: a call may still be reading it. */
static Table* table_with_room(void) {
  Table* old = atomic_load(&table);
  if (old && 2 * (table_used + 1) <= old->mask + 1) return old;
  uint64_t capacity = old ? 2 * (old->mask + 1) : 1024;
  Table* grown = calloc(1, sizeof(Table) + capacity * sizeof(Entry));
  if (!grown) return NULL;
  grown->mask = capacity - 1;
  for (uint64_t i = 0; old && i <= old->mask; ++i) {
    Entry* entry = &old->entries[i];
    if (atomic_load(&entry->kernel)) fill_slot(find_slot(grown, entry->key), entry);
  }
  atomic_store_explicit(&table, grown, memory_order_release);
  return grown;
}

/* 0: done or known already; 1: the key is known with another shape; 2: no memory. */
int hlofuse_register_kernel(uint64_t key, void* address, int64_t blocks, int64_t grain, int64_t counters,
                            int64_t shared) {
  Table* in = table_with_room();
  if (!in) return 2;
  Entry* slot = find_slot(in, key);
  if (atomic_load(&slot->kernel))
    return slot->blocks == blocks && slot->grain == grain && slot->counters == counters && slot->shared == shared ? 0 : 1;
  Entry entry = {.key = key, .blocks = blocks, .grain = grain, .counters = counters, .shared = shared};
  atomic_init(&entry.kernel, (Kernel)address);
  fill_slot(slot, &entry);
  ++table_used;
  return 0;
}

/* ---- Errors and attributes. ---- */

static XLA_FFI_Error* make_error(const XLA_FFI_Api* api, XLA_FFI_Error_Code code, const char* message) {
  XLA_FFI_Error_Create_Args args = {
      .struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE, .message = message, .errc = code};
  return api->XLA_FFI_Error_Create(&args);
}

static void drop_error(const XLA_FFI_Api* api, XLA_FFI_Error* error) {
  XLA_FFI_Error_Destroy_Args args = {.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, .error = error};
  api->XLA_FFI_Error_Destroy(&args);
}

static const void* find_attribute(const XLA_FFI_Attrs* attrs, const char* name, XLA_FFI_AttrType type) {
  size_t length = strlen(name);
  for (int64_t i = 0; i < attrs->size; ++i) {
    if (attrs->types[i] == type && attrs->names[i]->len == length && !memcmp(attrs->names[i]->ptr, name, length))
      return attrs->attrs[i];
  }
  return NULL;
}

static XLA_FFI_Error* unknown_kernel(const XLA_FFI_CallFrame* frame, uint64_t key) {
  const XLA_FFI_ByteSpan* name = find_attribute(&frame->attrs, "name", XLA_FFI_AttrType_STRING);
  char message[512];
  snprintf(message, sizeof message,
           "hlofuse: kernel '%.*s' (hash %016llx) is not loaded in this process. The program was compiled elsewhere, or "
           "taken from JAX's compilation cache; trace the function again with hlofuse.jit, which loads its kernels.",
           name ? (int)(name->len < 200 ? name->len : 200) : 1, name ? name->ptr : "?", (unsigned long long)key);
  return make_error(frame->api, XLA_FFI_Error_Code_NOT_FOUND, message);
}

/* ---- Large fresh results: huge pages, because first touches of small ones cost more than the kernel. ---- */

#if defined(__linux__) && defined(MADV_HUGEPAGE)
enum { HUGE_PAGE = 2 << 20, LARGE_RESULT = 4 << 20 };

/* Bytes per element; 0 for what is packed or unknown, which then simply gets no advice. */
static int64_t element_bytes(XLA_FFI_DataType type) {
  switch (type) {
    case XLA_FFI_DataType_PRED:
    case XLA_FFI_DataType_S8:
    case XLA_FFI_DataType_U8:
      return 1;
    case XLA_FFI_DataType_S16:
    case XLA_FFI_DataType_U16:
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16:
      return 2;
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32:
    case XLA_FFI_DataType_F32:
      return 4;
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_U64:
    case XLA_FFI_DataType_F64:
    case XLA_FFI_DataType_C64:
      return 8;
    case XLA_FFI_DataType_C128:
      return 16;
    default:
      return 0;
  }
}

static bool is_untouched(uintptr_t page) {
  unsigned char resident = 1;
  return !mincore((void*)page, 1, &resident) && !(resident & 1);
}

static void advise_huge_pages(const XLA_FFI_Buffer* result, void* const* operands, int64_t operand_count) {
  int64_t bytes = element_bytes(result->dtype);
  for (int64_t d = 0; d < result->rank; ++d) bytes *= result->dims[d];
  if (bytes < LARGE_RESULT) return;
  for (int64_t i = 0; i < operand_count; ++i)
    if (operands[i] == result->data) return; /* donated: its pages are there */
  /* Inward to whole huge pages: the neighbours on a shared page are not ours to advise on. */
  uintptr_t begin = ((uintptr_t)result->data + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1);
  uintptr_t end = ((uintptr_t)result->data + (uintptr_t)bytes) & ~(uintptr_t)(HUGE_PAGE - 1);
  if (begin < end && (is_untouched(begin) || is_untouched(end - HUGE_PAGE)))
    madvise((void*)begin, end - begin, MADV_HUGEPAGE);
}
#else
static void advise_huge_pages(const XLA_FFI_Buffer* result, void* const* operands, int64_t operand_count) {
  (void)result, (void)operands, (void)operand_count;
}
#endif

/* ---- A call whose blocks several threads take. ---- */

/* Lives until the last task has run, which may be after the call: a late task finds no block and only frees. Buffers
 * and counters are touched by holders of a block alone, so by nobody after the call. */
typedef struct {
  Kernel kernel;
  void** buffers;
  unsigned* counters;
  int64_t blocks, grain;
  atomic_llong next; /* first block that nobody has taken */
  atomic_llong done;
  atomic_int users;
} Job;

static void run_blocks(Job* job) {
  for (;;) {
    long long begin = atomic_fetch_add_explicit(&job->next, job->grain, memory_order_relaxed);
    if (begin >= job->blocks) return;
    long long end = begin + job->grain < job->blocks ? begin + job->grain : job->blocks;
    job->kernel(job->buffers, begin, end, job->counters);
    atomic_fetch_add_explicit(&job->done, end - begin, memory_order_release);
  }
}

static void release_job(Job* job, int uses) {
  if (atomic_fetch_sub_explicit(&job->users, uses, memory_order_acq_rel) == uses) free(job);
}

static void run_task(void* data) {
  run_blocks(data);
  release_job(data, 1);
}

static void pause_briefly(int round) {
  if (round > 2000) sched_yield(); /* the other thread may be waiting for this very core */
#if defined(__x86_64__) || defined(__i386__)
  else __builtin_ia32_pause();
#endif
}

static int64_t pool_threads(const XLA_FFI_CallFrame* frame) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args = {.struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE,
                                             .ctx = frame->ctx,
                                             .num_threads = &threads};
  XLA_FFI_Error* error = frame->api->XLA_FFI_ThreadPool_NumThreads(&args);
  if (!error) return threads;
  drop_error(frame->api, error); /* no pool here: the caller runs all */
  return 1;
}

static bool schedule(const XLA_FFI_CallFrame* frame, Job* job) {
  XLA_FFI_ThreadPool_Schedule_Args args = {.struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE,
                                           .ctx = frame->ctx,
                                           .task = run_task,
                                           .data = job};
  XLA_FFI_Error* error = frame->api->XLA_FFI_ThreadPool_Schedule(&args);
  if (error) drop_error(frame->api, error);
  return !error;
}

static void run_in_parallel(const XLA_FFI_CallFrame* frame, Job* job, int helpers) {
  atomic_init(&job->users, 1 + helpers);
  int scheduled = 0;
  while (scheduled < helpers && schedule(frame, job)) ++scheduled;
  run_blocks(job);
  for (int round = 0; atomic_load_explicit(&job->done, memory_order_acquire) < job->blocks; ++round)
    pause_briefly(round);
  release_job(job, 1 + helpers - scheduled);
}

/* ---- The handler. ---- */

enum { STACK_BUFFERS = 64, STACK_COUNTERS = 64 };

static void gather_buffers(const XLA_FFI_CallFrame* frame, void** buffers) {
  int64_t operands = frame->args.size;
  for (int64_t i = 0; i < operands; ++i) buffers[i] = ((XLA_FFI_Buffer*)frame->args.args[i])->data;
  for (int64_t i = 0; i < frame->rets.size; ++i) {
    const XLA_FFI_Buffer* result = frame->rets.rets[i];
    buffers[operands + i] = result->data;
    advise_huge_pages(result, buffers, operands);
  }
}

static XLA_FFI_Error* call_kernel(const XLA_FFI_CallFrame* frame, Kernel kernel, const Entry* entry) {
  int64_t count = frame->args.size + frame->rets.size;
  int64_t tasks = (entry->blocks + entry->grain - 1) / entry->grain;
  int64_t threads = tasks > 1 ? pool_threads(frame) : 1;

  if (threads <= 1 && count <= STACK_BUFFERS && entry->counters <= STACK_COUNTERS) {
    void* buffers[STACK_BUFFERS];
    unsigned counters[STACK_COUNTERS];
    memset(counters, 0, (size_t)entry->counters * sizeof *counters);
    gather_buffers(frame, buffers);
    kernel(buffers, 0, entry->blocks, counters);
    return NULL;
  }
  Job* job = calloc(1, sizeof(Job) + (size_t)count * sizeof(void*) + (size_t)entry->counters * sizeof(unsigned));
  if (!job) return make_error(frame->api, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "hlofuse: no memory for a call");
  job->kernel = kernel;
  job->buffers = (void**)(job + 1);
  job->counters = (unsigned*)(job->buffers + count);
  job->blocks = entry->blocks;
  job->grain = entry->grain;
  gather_buffers(frame, job->buffers);
  run_in_parallel(frame, job, (int)((tasks < threads ? tasks : threads) - 1));
  return NULL;
}

/* Answers a question for the handler's properties, which XLA asks before it calls; false where it asks for a call. */
static bool tell_properties(XLA_FFI_CallFrame* frame, XLA_FFI_Handler_Traits traits) {
  if (!frame->extension_start || frame->extension_start->type != XLA_FFI_Extension_Metadata) return false;
  /* Only what version 0.1 of the interface has is used, so every later XLA accepts the handler. */
  XLA_FFI_Metadata* metadata = ((XLA_FFI_Metadata_Extension*)frame->extension_start)->metadata;
  metadata->api_version.major_version = 0;
  metadata->api_version.minor_version = 1;
  metadata->traits = traits;
  return true;
}

/* The kernel of a call, or NULL and an error. */
static Entry* called_entry(const XLA_FFI_CallFrame* frame, XLA_FFI_Error** error) {
  const XLA_FFI_Scalar* scalar = find_attribute(&frame->attrs, "key", XLA_FFI_AttrType_SCALAR);
  if (!scalar || (scalar->dtype != XLA_FFI_DataType_U64 && scalar->dtype != XLA_FFI_DataType_S64)) {
    *error = make_error(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT, "hlofuse: the call has no 64-bit key");
    return NULL;
  }
  uint64_t key = *(const uint64_t*)scalar->value;
  Table* in = atomic_load_explicit(&table, memory_order_acquire);
  Entry* entry = in ? find_slot(in, key) : NULL;
  if (entry && atomic_load_explicit(&entry->kernel, memory_order_acquire)) return entry;
  *error = unknown_kernel(frame, key);
  return NULL;
}

XLA_FFI_Error* hlofuse_call(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Error* error = NULL;
  if (tell_properties(frame, 0)) return NULL;
  Entry* entry = called_entry(frame, &error);
  if (!entry || entry->blocks <= 0) return error;
  return call_kernel(frame, atomic_load_explicit(&entry->kernel, memory_order_acquire), entry);
}

/* ---- CUDA. The driver is not linked: Python hands over the functions that a call needs. ---- */

typedef int (*LaunchKernel)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared, void* stream, void** parameters,
                            void** extra);
typedef int (*FillWords)(unsigned long long to, unsigned value, size_t count, void* stream);
typedef int (*FunctionOfKernel)(void** function, void* kernel);

static _Atomic(LaunchKernel) launch_kernel; /* cuLaunchKernel, which takes a CUkernel */
static _Atomic(FillWords) fill_words;       /* cuMemsetD32Async */
static _Atomic(FunctionOfKernel) function_of_kernel; /* cuKernelGetFunction */

void hlofuse_use_driver(void* launch, void* fill, void* function) {
  atomic_store(&fill_words, (FillWords)fill);
  atomic_store(&function_of_kernel, (FunctionOfKernel)function);
  atomic_store(&launch_kernel, (LaunchKernel)launch);
}

static XLA_FFI_Error* driver_error(const XLA_FFI_CallFrame* frame, const char* what, int code) {
  const XLA_FFI_ByteSpan* name = find_attribute(&frame->attrs, "name", XLA_FFI_AttrType_STRING);
  char message[512];
  snprintf(message, sizeof message, "hlofuse: %s of kernel '%.*s' failed: CUDA driver error %d", what,
           name ? (int)(name->len < 200 ? name->len : 200) : 1, name ? name->ptr : "?", code);
  return make_error(frame->api, XLA_FFI_Error_Code_INTERNAL, message);
}

/* Loads a kernel into the device's context: a driver that loads late would do so within a recording. */
XLA_FFI_Error* hlofuse_cuda_initialize(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Error* error = NULL;
  void* function = NULL;
  if (tell_properties(frame, XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE)) return NULL;
  Entry* entry = called_entry(frame, &error);
  if (!entry || entry->blocks <= 0) return error;
  FunctionOfKernel load = atomic_load(&function_of_kernel);
  int code = load ? load(&function, (void*)atomic_load(&entry->kernel)) : 0;
  return code ? driver_error(frame, "loading", code) : NULL;
}

/* A kernel's parameters are pointers: operands, results, scratch and, the last result where there are any, counters,
 * which are this call's own and are zeroed on its stream: neither streams nor replays of a graph can meet there. */
XLA_FFI_Error* hlofuse_cuda_call(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Error* error = NULL;
  if (tell_properties(frame, XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE)) return NULL;
  Entry* entry = called_entry(frame, &error);
  if (!entry || entry->blocks <= 0) return error;
  LaunchKernel launch = atomic_load(&launch_kernel);
  if (!launch) return make_error(frame->api, XLA_FFI_Error_Code_FAILED_PRECONDITION, "hlofuse: no CUDA driver");
  XLA_FFI_Stream_Get_Args stream = {.struct_size = XLA_FFI_Stream_Get_Args_STRUCT_SIZE, .ctx = frame->ctx};
  if ((error = frame->api->XLA_FFI_Stream_Get(&stream))) return error;

  int64_t operands = frame->args.size, count = operands + frame->rets.size;
  void* on_stack[2 * STACK_BUFFERS];
  void** values = count < STACK_BUFFERS ? on_stack : malloc(2 * (size_t)(count + 1) * sizeof *values);
  if (!values) return make_error(frame->api, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "hlofuse: no memory for a call");
  void** parameters = values + count + 1;
  for (int64_t i = 0; i < count; ++i) {
    values[i] = ((XLA_FFI_Buffer*)(i < operands ? frame->args.args[i] : frame->rets.rets[i - operands]))->data;
    parameters[i] = &values[i];
  }
  values[count] = NULL; /* no counters */
  parameters[count] = &values[count];
  const char* what = "zeroing the counters";
  int code = entry->counters
                 ? atomic_load(&fill_words)((uintptr_t)values[count - 1], 0, (size_t)entry->counters, stream.stream)
                 : 0;
  if (!code) {
    what = "the launch";
    code = launch((void*)atomic_load(&entry->kernel), (unsigned)entry->blocks, 1, 1, (unsigned)entry->grain, 1, 1,
                  (unsigned)entry->shared, stream.stream, parameters, NULL);
  }
  if (values != on_stack) free(values);
  return code ? driver_error(frame, what, code) : NULL;
}
