// What a kernel under SIMT and the machine that runs it (simt_machine.cpp) know of each other. The kernel is CUDA text,
// compiled for the CPU; each thread of a block is a fiber, and asks the machine before it touches memory or waits.
namespace simt {

enum Access { READ, WRITE, ATOMIC };
enum Wait {
  SYNC_THREADS, SYNC_THREADS_OR, SYNC_THREADS_AND, SYNC_THREADS_COUNT,  // all threads of the block
  SYNC_WARP, SHUFFLE_INDEX, SHUFFLE_UP, SHUFFLE_DOWN, SHUFFLE_XOR,      // the lanes of a mask, from here on
  BALLOT, ANY, ALL, MATCH_ANY,
  REDUCE_ADD, REDUCE_MIN, REDUCE_MAX, REDUCE_MIN_SIGNED, REDUCE_MAX_SIGNED, REDUCE_AND, REDUCE_OR, REDUCE_XOR,
};

// A place in the text: a file (the kernel's own is what ends in no ".h") and, in a prelude, the kernel's line that led there.
struct Site {
  const char* file;
  int line;
  int kernel_line;
};

// One array: a buffer of the launch, or shared memory of the running block. What it is in the race detector's books is
// the machine's; without books (`shadow` is null) an array is only read.
struct Region {
  const char* name;
  char* base;
  long long bytes;
  int element;      // bytes of one
  bool initialized;
  void* shadow;
};

struct Machine {
  // Ends the thread with a report unless the access is inside the array, and ordered with those of other threads.
  void (*touch)(Region* region, long long offset, long long bytes, Access access, Site site);
  void (*touch_address)(const void* address, long long bytes, Access access, Site site);
  void (*misaligned)(Region* region, long long offset, long long alignment, Site site);
  // The running block's array that belongs to a declaration.
  Region* (*shared)(const void* declaration, const char* name, long long bytes, int element, Site site);
  unsigned long long (*wait)(Wait wait, unsigned mask, unsigned long long value, int operand, int width, Site site);
  void (*fence)();
  unsigned (*active_lanes)();
  unsigned (*place)(int which);  // threadIdx.x, blockIdx.x, blockDim.x, gridDim.x
};

// The text of one thread.
typedef void Entry(const Machine* machine, Region* buffers);

}  // namespace simt
