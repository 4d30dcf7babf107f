// The machine of the SIMT dialect: runs a kernel's blocks one after the other, each thread of a block as a fiber, and
// reports what the hardware would let pass silently. Blocks, and threads wherever they may run, go in seeded random order.
//
// Order between accesses is kept as in a race detector with vector clocks, but coarse where the hardware is: `phase`
// counts barriers over the whole launch, `tick` the synchronizations of a warp. An access is known by both. What another
// block wrote may be read after the protocol of threadFenceReduction only: fence, atomic; atomic, fence.
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#if !defined(__x86_64__) || defined(SIMT_UCONTEXT)
#include <ucontext.h>
#define SIMT_USES_UCONTEXT 1
#endif
#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

namespace simt {

enum { WARP = 32, MAX_THREADS = 1024, MAX_SHARED = 256, SHARED_BYTES = 232448, REPORT = 2048, PAGE = 4096 };
enum { STACK = 1 << 18 };
enum State { READY, WAITING, DONE };

// What is known of the accesses to one element. `phase` 0: none.
struct Shadow {
  unsigned write_phase, write_tick, read_phase, read_tick;
  unsigned read_lanes;          // of one warp, since `read_phase` began
  short writer, reading_warp;   // a thread; a warp, or MANY
  unsigned char written, atomic;
};
enum { MANY = -1 };

struct Time {
  unsigned phase, tick;
};

struct Fiber {
#ifdef SIMT_USES_UCONTEXT
  ucontext_t context;
#else
  void* stack_pointer;
#endif
  char* stack;
  int index;
  State state;
  Wait wait;
  unsigned mask;
  int operand, width;
  unsigned long long value;
  Site site;
  int kernel_line;   // the last line of the kernel itself that this thread is known to have reached
  Time fence;        // the last one
  Time known_fence;  // the last one that the block's other threads know of, by a barrier
};

struct Warp {
  unsigned tick;
  unsigned seen[WARP][WARP];  // [lane][other]: accesses of `other` before this tick come before what `lane` does now
};

// An atomic after a fence: what each thread wrote before its known fence is for those who see the atomic.
struct Publication {
  Publication* before;
  const void* address;
  Time* until;  // by thread
};

struct Acquisition {
  const void* address;
  int thread;
  Time time;
  unsigned fenced;  // the phase in which the thread itself fenced; 0: not yet
};

struct PastBlock {
  unsigned first_phase;
  long long block;
  Publication* publications;
};

struct SharedArray {
  const void* declaration;
  Region region;
  long long capacity;
};

struct Launch {
  const Machine* machine;
  Entry* entry;
  Region* buffers;
  int buffer_count;
  const char* name;
  const char* text;
  long long blocks, block;
  int threads, live;
  unsigned long long random;
  Fiber* fibers;
  Fiber* current;
#ifdef SIMT_USES_UCONTEXT
  ucontext_t scheduler;
#else
  void* scheduler;
#endif
  Warp warps[MAX_THREADS / WARP];
  int ready[MAX_THREADS], ready_count;
  unsigned phase, block_phase, fences;
  PastBlock* past;
  long long past_count;
  Acquisition* acquisitions;
  int acquisition_count, acquisition_room;
  SharedArray shared[MAX_SHARED];
  int shared_count;
  long long shared_bytes;
  bool failed;
  char* report;
  int report_size;
};

static __thread Launch* now;

// --- fibers -----------------------------------------------------------------------------------------------------------

static void run_thread() {
  now->entry(now->machine, now->buffers);
  now->current->state = DONE;
  now->live--;
}

#ifdef SIMT_USES_UCONTEXT
static void prepare(Fiber* f) {
  getcontext(&f->context);
  f->context.uc_stack.ss_sp = f->stack;
  f->context.uc_stack.ss_size = STACK;
  f->context.uc_link = &now->scheduler;
  makecontext(&f->context, run_thread, 0);
}
static void resume(Fiber* f) {
  now->current = f;
  swapcontext(&now->scheduler, &f->context);
  now->current = nullptr;
}
static void yield() { swapcontext(&now->current->context, &now->scheduler); }
#else
// Stores the callee-saved registers and the stack pointer of one fiber, and takes up those of another.
extern "C" void hlofuse_simt_switch(void** from, void* to);
__asm__(R"(.text
.globl hlofuse_simt_switch
.hidden hlofuse_simt_switch
.type hlofuse_simt_switch,@function
hlofuse_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size hlofuse_simt_switch,.-hlofuse_simt_switch
)");
static void yield() { hlofuse_simt_switch(&now->current->stack_pointer, now->scheduler); }
static void run_and_end() {
  run_thread();
  for (;;) yield();
}
static void prepare(Fiber* f) {
  void** top = (void**)(f->stack + STACK) - 4;  // at a function's entry the stack is 8 bytes off a multiple of 16
  *top = (void*)run_and_end;
  for (int k = 0; k < 6; k++) *--top = nullptr;
  f->stack_pointer = top;
}
static void resume(Fiber* f) {
  now->current = f;
  hlofuse_simt_switch(&now->scheduler, f->stack_pointer);
  now->current = nullptr;
}
#endif

// Stacks of a launch, kept for a later one. Only touched pages take memory; a page before each stack takes none.
struct Stacks {
  Stacks* next;
  char* memory;
  int count;
};
static Stacks* free_stacks;
static char stacks_lock;

static Stacks* exchange_stacks(Stacks* given, int count) {
  while (__atomic_test_and_set(&stacks_lock, __ATOMIC_ACQUIRE)) sched_yield();
  Stacks* taken = nullptr;
  if (given) {
    given->next = free_stacks;
    free_stacks = given;
  } else {
    for (Stacks** place = &free_stacks; *place && !taken; place = taken ? place : &(*place)->next)
      if ((*place)->count >= count) {
        taken = *place;
        *place = taken->next;
      }
  }
  __atomic_clear(&stacks_lock, __ATOMIC_RELEASE);
  return taken;
}

static Stacks* take_stacks(int threads) {
  int count = 32;
  while (count < threads) count *= 2;
  if (Stacks* known = exchange_stacks(nullptr, count)) return known;
  const size_t each = STACK + PAGE;
  char* memory = (char*)mmap(nullptr, each * (size_t)count, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  Stacks* stacks = (Stacks*)malloc(sizeof(Stacks));
  if (memory == (char*)MAP_FAILED || !stacks) return nullptr;
  for (int k = 0; k < count; k++) mprotect(memory + each * (size_t)k, PAGE, PROT_NONE);
  *stacks = Stacks{nullptr, memory, count};
  return stacks;
}

static unsigned long long draw(unsigned long long below) {
  unsigned long long x = now->random;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  now->random = x;
  return x % below;
}

// --- reports ----------------------------------------------------------------------------------------------------------

static bool in_kernel(Site site) { return site.file && site.file[0] && site.file[strlen(site.file) - 1] != 'h'; }

static void put(const char* format, ...) {
  const int used = (int)strlen(now->report);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(now->report + used, (size_t)(now->report_size - used), format, arguments);
  va_end(arguments);
}

static void put_line(int line) {
  const char* start = now->text;
  for (int k = 1; start && k < line; k++) {
    start = strchr(start, '\n');
    if (start) start++;
  }
  if (!start) return;
  while (*start == ' ') start++;
  put("\n    %.*s", (int)strcspn(start, "\n"), start);
}

static void put_place(const Fiber* f, Site site) {
  const int line = in_kernel(site) ? site.line : site.kernel_line ? site.kernel_line : 0;
  put("kernel %s, block %lld, thread %d, ", now->name, now->block, f->index);
  if (line) put("line %d", line);
  else put("%s:%d", site.file ? site.file : "?", site.line);
  if (!line && f->kernel_line) put(", after line %d", f->kernel_line);
}

static int quoted_line(const Fiber* f, Site site) {
  return in_kernel(site) ? site.line : site.kernel_line ? site.kernel_line : f->kernel_line;
}

// The launch ends with the first report; the stacks of all threads are left as they are.
static void report(const Fiber* f, Site site, const char* what) {
  if (now->failed) return;
  now->failed = true;
  now->report[0] = 0;
  put_place(f, site);
  put(": %s", what);
  if (const int line = quoted_line(f, site)) put_line(line);
}

static void fail(Site site, const char* format, ...) {
  char what[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  Fiber* f = now->current;
  report(f, site, what);
  f->state = DONE;
  for (;;) yield();
}

// What the processor refuses (a division by zero, an address that no array knows of) is a report too, and not the end of
// the process. The handlers are there while launches run; signals of others go where they went before.
enum { SIGNALS = 3, SIGNAL_STACK = 1 << 16 };
static const int caught_signals[SIGNALS] = {SIGFPE, SIGSEGV, SIGBUS};
static struct sigaction earlier_actions[SIGNALS];
static int running_launches;
static char signals_lock;

static void on_signal(int number, siginfo_t*, void*) {
  if (now && now->current) {
    Fiber* f = now->current;
    report(f, Site{nullptr, 0, f->kernel_line},
           number == SIGFPE ? "integer division by zero, here or later" : "access of unknown memory, or no stack left, here or later");
    f->state = DONE;
    for (;;) yield();
  }
  for (int k = 0; k < SIGNALS; k++)
    if (caught_signals[k] == number) sigaction(number, &earlier_actions[k], nullptr);
}

static void catch_signals(int change) {
  while (__atomic_test_and_set(&signals_lock, __ATOMIC_ACQUIRE)) sched_yield();
  const bool first = change > 0 && running_launches == 0, last = change < 0 && running_launches == 1;
  running_launches += change;
  for (int k = 0; k < SIGNALS && (first || last); k++) {
    struct sigaction action, current;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    if (first) sigaction(caught_signals[k], &action, &earlier_actions[k]);
    else if (!sigaction(caught_signals[k], nullptr, &current) && current.sa_sigaction == on_signal)
      sigaction(caught_signals[k], &earlier_actions[k], nullptr);
  }
  __atomic_clear(&signals_lock, __ATOMIC_RELEASE);
}

// --- memory -----------------------------------------------------------------------------------------------------------

static const char* const access_names[] = {"read", "write", "atomic"};

static bool is_before(Time a, Time b) { return a.phase < b.phase || (a.phase == b.phase && a.tick < b.tick); }

static Time time_of(const Fiber* f) { return Time{now->phase, now->warps[f->index / WARP].tick}; }

static PastBlock* block_of(unsigned phase) {
  long long low = 0, high = now->past_count - 1;
  while (low < high) {
    const long long middle = (low + high + 1) / 2;
    if (now->past[middle].first_phase <= phase) low = middle; else high = middle - 1;
  }
  return now->past + low;
}

// Whether this thread may rely on having seen the atomic: a fence stands after it, and a barrier if it was another's.
static bool has_acquired(const Fiber* f, const Acquisition* a) {
  if (a->thread == f->index) return a->fenced != 0;
  return a->time.phase < f->fence.phase || (a->fenced && a->fenced < now->phase);
}

static bool comes_before(Time when, int thread) {
  const Fiber* f = now->current;
  if (when.phase == now->phase) {
    if (thread == f->index) return true;
    if (thread / WARP != f->index / WARP) return false;
    return when.tick < now->warps[f->index / WARP].seen[f->index % WARP][thread % WARP];
  }
  if (when.phase >= now->block_phase) return true;
  for (const Publication* p = block_of(when.phase)->publications; p; p = p->before) {
    if (!is_before(when, p->until[thread])) continue;
    for (int k = 0; k < now->acquisition_count; k++)
      if (now->acquisitions[k].address == p->address && has_acquired(f, &now->acquisitions[k])) return true;
  }
  return false;
}

static void race(Region* region, long long element, Access access, Access other, Time when, int thread, Site site) {
  const bool same_block = when.phase >= now->block_phase;
  char who[64];
  if (thread < 0) snprintf(who, sizeof who, "other threads");
  else if (same_block) snprintf(who, sizeof who, "thread %d", thread);
  else snprintf(who, sizeof who, "thread %d of block %lld", thread, block_of(when.phase)->block);
  fail(site, "%s of %s[%lld], unordered with the %s by %s%s", access_names[access], region->name, element, access_names[other], who,
       same_block ? ": no barrier stands between" : ": no fence and atomic of both blocks stand between");
}

static void check_reads(Region* region, Shadow* s, long long element, Access access, Site site) {
  if (!s->read_phase) return;
  const Fiber* f = now->current;
  if (s->reading_warp == MANY) {
    if (s->read_phase == now->phase) race(region, element, access, READ, Time{s->read_phase, 0}, -1, site);
    return;
  }
  for (int lane = 0; lane < WARP; lane++) {
    const int thread = s->reading_warp * WARP + lane;
    if (!(s->read_lanes >> lane & 1u) || (thread == f->index && s->read_phase >= now->block_phase)) continue;
    const Time when = {s->read_phase, s->read_tick};
    if (!comes_before(when, thread)) race(region, element, access, READ, when, thread, site);
  }
}

static void note_read(Shadow* s) {
  const Fiber* f = now->current;
  const int warp = f->index / WARP, lane = f->index % WARP;
  const Warp* w = &now->warps[warp];
  if (s->read_phase != now->phase) {
    s->read_phase = now->phase;
    s->reading_warp = (short)warp;
    s->read_lanes = 0;
  } else if (s->reading_warp != warp) {
    s->reading_warp = MANY;
    return;
  } else if (s->read_tick < w->tick) {  // a later write after this read is after those that come before it
    for (int other = 0; other < WARP; other++)
      if (s->read_tick < w->seen[lane][other]) s->read_lanes &= ~(1u << other);
  }
  s->read_lanes |= 1u << lane;
  s->read_tick = w->tick;
}

static void check_element(Region* region, long long element, Access access, Site site) {
  Shadow* s = (Shadow*)region->shadow + element;
  const Fiber* f = now->current;
  if (!s->written && !region->initialized && access != WRITE)
    fail(site, "%s of %s[%lld], which nothing has written", access_names[access], region->name, element);
  if (s->write_phase && !(access == ATOMIC && s->atomic)) {
    const Time when = {s->write_phase, s->write_tick};
    if (!comes_before(when, s->writer))
      race(region, element, access, s->atomic ? ATOMIC : WRITE, when, s->writer, site);
  }
  if (access == READ) return note_read(s);
  check_reads(region, s, element, access, site);
  const Time when = time_of(f);
  s->write_phase = when.phase;
  s->write_tick = when.tick;
  s->writer = (short)f->index;
  s->written = 1;
  s->atomic = access == ATOMIC;
  s->read_phase = 0;
}

static void touch(Region* region, long long offset, long long bytes, Access access, Site site) {
  if (in_kernel(site)) now->current->kernel_line = site.line;
  else if (site.kernel_line) now->current->kernel_line = site.kernel_line;
  if (offset < 0 || offset + bytes > region->bytes) {
    const long long first = offset / region->element, size = region->bytes / region->element;
    fail(site, "%s outside of %s: index %lld, it has %lld elements", access_names[access], region->name,
         offset < 0 || first > size ? first : size, size);  // of a vector, the first element that is outside
  }
  if (!region->shadow) return;
  const long long last = (offset + bytes - 1) / region->element;
  for (long long element = offset / region->element; element <= last; element++)
    check_element(region, element, access, site);
}

static void misaligned(Region* region, long long offset, long long alignment, Site site) {
  fail(site, "access of %lld bytes at once to %s[%lld], which is not aligned to them", alignment, region->name,
       offset / region->element);
}

static Region* region_of(const char* address) {
  for (int k = 0; k < now->buffer_count; k++) {
    Region* r = now->buffers + k;
    if (address >= r->base && address < r->base + r->bytes) return r;
  }
  return nullptr;
}

// What this thread knows to be fenced is from now on for those who see the atomic.
static void publish(const void* address) {
  const Fiber* f = now->current;
  PastBlock* block = now->past + now->past_count - 1;
  Publication* p = block->publications;
  while (p && p->address != address) p = p->before;
  if (!p) {
    p = (Publication*)calloc(1, sizeof(Publication) + (size_t)now->threads * sizeof(Time));
    p->address = address;
    p->until = (Time*)(p + 1);
    p->before = block->publications;
    block->publications = p;
  }
  for (int t = 0; t < now->threads; t++) {
    const Time known = t == f->index ? f->fence : now->fibers[t].known_fence;
    if (is_before(p->until[t], known)) p->until[t] = known;
  }
}

static void note_atomic(const void* address) {
  Launch* l = now;
  const Fiber* f = l->current;
  if (l->fences) publish(address);
  for (int k = 0; k < l->acquisition_count; k++)
    if (l->acquisitions[k].address == address && l->acquisitions[k].thread == f->index) return;
  if (l->acquisition_count == l->acquisition_room) {
    l->acquisition_room = l->acquisition_room ? 2 * l->acquisition_room : 64;
    l->acquisitions = (Acquisition*)realloc(l->acquisitions, (size_t)l->acquisition_room * sizeof(Acquisition));
  }
  l->acquisitions[l->acquisition_count++] = Acquisition{address, f->index, time_of(f), 0};
}

static void touch_address(const void* address, long long bytes, Access access, Site site) {
  Region* region = region_of((const char*)address);
  if (!region) fail(site, "atomic at an address outside of every buffer (a counter beyond the launch's?)");
  touch(region, (const char*)address - region->base, bytes, access, site);
  if (access == ATOMIC) note_atomic(address);
}

static void touch_memory(Region* region, long long offset, long long bytes, Access access, Site site) {
  touch(region, offset, bytes, access, site);
  if (access == ATOMIC) note_atomic(region->base + offset);
}

static void fence() {
  Fiber* f = now->current;
  Warp* w = &now->warps[f->index / WARP];
  now->fences++;
  f->fence = Time{now->phase, ++w->tick};
  for (int k = 0; k < now->acquisition_count; k++) {
    Acquisition* a = &now->acquisitions[k];
    if (a->thread == f->index && !a->fenced) a->fenced = now->phase;
  }
}

static Region* shared(const void* declaration, const char* name, long long bytes, int element, Site site) {
  Launch* l = now;
  SharedArray* found = nullptr;
  for (int k = 0; k < l->shared_count && !found; k++)
    if (l->shared[k].declaration == declaration) found = l->shared + k;
  if (!found) {
    if (l->shared_count == MAX_SHARED) fail(site, "more than %d shared arrays", MAX_SHARED);
    found = l->shared + l->shared_count++;
    const long long elements = bytes / element;
    char* memory = (char*)calloc(1, (size_t)(bytes + 64) + (size_t)elements * sizeof(Shadow));
    found->declaration = declaration;
    found->region = Region{name, memory + (size_t)elements * sizeof(Shadow), bytes, element, false, memory};
    memset(found->region.base, 0xff, (size_t)bytes);  // NaN
    l->shared_bytes += bytes;
    if (l->shared_bytes > SHARED_BYTES)
      fail(site, "%lld bytes of shared memory, a block has %d", l->shared_bytes, SHARED_BYTES);
  }
  return &found->region;
}

// --- waiting ----------------------------------------------------------------------------------------------------------

static bool is_block_wait(Wait w) { return w <= SYNC_THREADS_COUNT; }

static void make_ready(Fiber* f) {
  f->state = READY;
  now->ready[now->ready_count++] = f->index;
}

// The lane that a shuffle reads: -1 for its own.
static int source_lane(const Fiber* f) {
  const int lane = f->index % WARP, width = f->width, first = lane & ~(width - 1), last = first + width - 1;
  int source = lane;
  if (f->wait == SHUFFLE_INDEX) source = first + (f->operand & (width - 1));
  if (f->wait == SHUFFLE_UP) source = lane - f->operand < first ? lane : lane - f->operand;
  if (f->wait == SHUFFLE_DOWN) source = lane + f->operand > last ? lane : lane + f->operand;
  if (f->wait == SHUFFLE_XOR) source = (lane ^ f->operand) > last ? lane : lane ^ f->operand;
  return source;
}

static void join_warp(Warp* w, unsigned lanes) {
  const unsigned tick = ++w->tick;
  unsigned joined[WARP] = {0};
  for (int a = 0; a < WARP; a++)
    if (lanes >> a & 1u)
      for (int b = 0; b < WARP; b++) joined[b] = w->seen[a][b] > joined[b] ? w->seen[a][b] : joined[b];
  for (int b = 0; b < WARP; b++)
    if (lanes >> b & 1u) joined[b] = tick;
  for (int a = 0; a < WARP; a++)
    if (lanes >> a & 1u) memcpy(w->seen[a], joined, sizeof joined);
}

// One result for all lanes of the mask, or for this lane.
static unsigned long long combine(const Fiber* warp, unsigned lanes, const Fiber* f) {
  unsigned bits = 0, equal = 0, sum = 0, low = ~0u, high = 0, both = ~0u, either = 0, odd = 0;
  int low_signed = 0x7fffffff, high_signed = -0x7fffffff - 1;
  for (int lane = 0; lane < WARP; lane++) {
    if (!(lanes >> lane & 1u)) continue;
    const unsigned value = (unsigned)warp[lane].value;
    if (value) bits |= 1u << lane;
    if (warp[lane].value == f->value) equal |= 1u << lane;
    sum += value;
    low = value < low ? value : low;
    high = value > high ? value : high;
    low_signed = (int)value < low_signed ? (int)value : low_signed;
    high_signed = (int)value > high_signed ? (int)value : high_signed;
    both &= value;
    either |= value;
    odd ^= value;
  }
  switch (f->wait) {
    case BALLOT: return bits;
    case ANY: return bits != 0;
    case ALL: return bits == lanes;
    case MATCH_ANY: return equal;
    case REDUCE_ADD: return sum;
    case REDUCE_MIN: return low;
    case REDUCE_MAX: return high;
    case REDUCE_MIN_SIGNED: return (unsigned)low_signed;
    case REDUCE_MAX_SIGNED: return (unsigned)high_signed;
    case REDUCE_AND: return both;
    case REDUCE_OR: return either;
    case REDUCE_XOR: return odd;
    default: return 0;
  }
}

// Lets the lanes of `f`'s mask go on if all of them that still run wait for the same.
static void try_warp(Fiber* f) {
  const int first = f->index / WARP * WARP;
  Fiber* warp = now->fibers + first;
  const unsigned mask = f->mask;
  const Wait what = f->wait;
  unsigned lanes = 0;
  for (int lane = 0; lane < WARP && first + lane < now->threads; lane++) {
    if (!(mask >> lane & 1u) || warp[lane].state == DONE) continue;
    if (warp[lane].state != WAITING || warp[lane].wait != what || warp[lane].mask != mask) return;
    lanes |= 1u << lane;
  }
  unsigned long long results[WARP];
  for (int lane = 0; lane < WARP; lane++) {
    if (!(lanes >> lane & 1u)) continue;
    Fiber* g = warp + lane;
    results[lane] = g->value;
    if (what >= SHUFFLE_INDEX && what <= SHUFFLE_XOR) {
      const int source = source_lane(g);
      if (source != lane && !(lanes >> source & 1u)) {
        char text[160];
        const bool ended = first + source >= now->threads || (mask >> source & 1u);
        snprintf(text, sizeof text, "shuffle from lane %d, which %s", source,
                 first + source >= now->threads ? "the block does not have"
                 : ended ? "has exited" : "is not in the mask");
        if (!ended) snprintf(text + strlen(text), sizeof text - strlen(text), " %08x", mask);
        report(g, g->site, text);
        return;
      }
      results[lane] = warp[source].value;
    } else if (what != SYNC_WARP) {
      results[lane] = combine(warp, lanes, g);
    }
  }
  if (what == SYNC_WARP) join_warp(&now->warps[first / WARP], lanes);
  for (int lane = 0; lane < WARP; lane++)
    if (lanes >> lane & 1u) {
      warp[lane].value = results[lane];
      make_ready(warp + lane);
    }
}

static unsigned long long wait_for(Wait what, unsigned mask, unsigned long long value, int operand, int width,
                                   Site site) {
  Fiber* f = now->current;
  if (in_kernel(site)) f->kernel_line = site.line;
  if (!is_block_wait(what) && !(mask >> (f->index % WARP) & 1u))
    fail(site, "lane %d is not in its own mask %08x", f->index % WARP, mask);
  if (what >= SHUFFLE_INDEX && what <= SHUFFLE_XOR && (width < 1 || width > WARP || (width & (width - 1))))
    fail(site, "shuffle of width %d", width);
  f->wait = what;
  f->mask = mask;
  f->value = value;
  f->operand = operand;
  f->width = width;
  f->site = site;
  f->state = WAITING;
  if (!is_block_wait(what)) try_warp(f);
  yield();
  return f->value;
}

static const char* wait_name(Wait what) {
  if (is_block_wait(what)) return "a barrier";
  if (what == SYNC_WARP) return "__syncwarp";
  return what <= SHUFFLE_XOR ? "a shuffle" : "a vote";
}

// Nobody can run: lets all pass the barrier, or says who is missing.
static void try_barrier() {
  Launch* l = now;
  Fiber *waiting = nullptr, *other = nullptr, *exited = nullptr;
  int arrived = 0;
  bool any = false, all = true;
  unsigned long long count = 0;
  for (int t = 0; t < l->threads; t++) {
    Fiber* f = l->fibers + t;
    if (f->state == DONE) { exited = f; continue; }
    if (!is_block_wait(f->wait)) { other = f; continue; }
    arrived++;
    if (waiting && (waiting->wait != f->wait || waiting->site.line != f->site.line || strcmp(waiting->site.file, f->site.file)))
      other = f;
    else
      waiting = f;
    any |= f->value != 0;
    all &= f->value != 0;
    count += f->value;
  }
  char text[400];
  if (!waiting) {
    const Fiber* f = other;
    snprintf(text, sizeof text, "waits at %s with mask %08x, whose other lanes never come", wait_name(f->wait), f->mask);
    const int first = f->index / WARP * WARP;
    for (int lane = 0; lane < WARP && first + lane < l->threads; lane++) {
      const Fiber* g = l->fibers + first + lane;
      if (!(f->mask >> lane & 1u) || g->state == DONE || (g->wait == f->wait && g->mask == f->mask)) continue;
      snprintf(text + strlen(text), sizeof text - strlen(text), ": thread %d waits at %s with mask %08x (%s:%d)",
               g->index, wait_name(g->wait), g->mask, g->site.file, g->site.line);
      break;
    }
    return report(f, f->site, text);
  }
  if (other) {
    snprintf(text, sizeof text, "waits at a barrier that not all threads reach: thread %d waits at %s (%s:%d)",
             other->index, is_block_wait(other->wait) ? "another" : wait_name(other->wait), other->site.file,
             other->site.line);
    return report(waiting, waiting->site, text);
  }
  if (exited) {
    snprintf(text, sizeof text, "waits at a barrier that not all threads reach: %d of %d wait, thread %d has exited",
             arrived, l->threads, exited->index);
    return report(waiting, waiting->site, text);
  }
  const Wait what = waiting->wait;
  l->phase++;
  memset(l->warps, 0, sizeof l->warps);
  for (int t = 0; t < l->threads; t++) {
    Fiber* f = l->fibers + t;
    f->known_fence = f->fence;
    f->value = what == SYNC_THREADS_COUNT ? count : what == SYNC_THREADS_OR ? any : all;
    make_ready(f);
  }
}

static unsigned active_lanes() {
  const int first = now->current->index / WARP * WARP;
  unsigned lanes = 0;
  for (int lane = 0; lane < WARP && first + lane < now->threads; lane++)
    if (now->fibers[first + lane].state == READY) lanes |= 1u << lane;
  return lanes;
}

static unsigned place(int which) {
  const Launch* l = now;
  return which == 0   ? (unsigned)l->current->index
         : which == 1 ? (unsigned)l->block
         : which == 2 ? (unsigned)l->threads
                      : (unsigned)l->blocks;
}

static const Machine the_machine = {touch_memory, touch_address, misaligned, shared, wait_for, fence, active_lanes, place};

// --- blocks -----------------------------------------------------------------------------------------------------------

static void run_block(long long block) {
  Launch* l = now;
  l->block = block;
  l->live = l->threads;
  l->phase++;
  l->block_phase = l->phase;
  l->acquisition_count = 0;
  l->fences = 0;
  l->past[l->past_count++] = PastBlock{l->phase, block, nullptr};
  memset(l->warps, 0, sizeof l->warps);
  for (int k = 0; k < l->shared_count; k++) {
    Region* r = &l->shared[k].region;
    memset(r->shadow, 0, (size_t)(r->bytes / r->element) * sizeof(Shadow));
    memset(r->base, 0xff, (size_t)r->bytes);
  }
  l->ready_count = 0;
  for (int t = 0; t < l->threads; t++) {
    Fiber* f = l->fibers + t;
    f->kernel_line = 0;
    f->fence = f->known_fence = Time{0, 0};
    prepare(f);
    make_ready(f);
  }
  int round[MAX_THREADS];
  while (l->live && !l->failed) {
    const int count = l->ready_count;
    if (!count) {
      try_barrier();
      continue;
    }
    memcpy(round, l->ready, (size_t)count * sizeof *round);
    l->ready_count = 0;
    if (l->random)
      for (int k = count - 1; k > 0; k--) {
        const int other = (int)draw((unsigned long long)k + 1), t = round[k];
        round[k] = round[other];
        round[other] = t;
      }
    for (int k = 0; k < count && !l->failed; k++) {
      Fiber* f = l->fibers + round[k];
      resume(f);
      if (f->state != DONE) continue;
      // Lanes that wait for this one need wait no longer.
      const int first = f->index / WARP * WARP;
      for (int lane = 0; lane < WARP && first + lane < l->threads; lane++) {
        Fiber* g = l->fibers + first + lane;
        if (g->state == WAITING && !is_block_wait(g->wait) && (g->mask >> (f->index % WARP) & 1u)) try_warp(g);
      }
    }
  }
}

static size_t shadow_bytes(const Region* r) { return (size_t)(r->bytes / r->element + 1) * sizeof(Shadow); }

static bool add_shadows(Region* buffers, int count, const char* kinds) {
  for (int k = 0; k < count; k++) {
    if (kinds[k] == 'I') continue;
    void* shadow = mmap(nullptr, shadow_bytes(buffers + k), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (shadow == MAP_FAILED) return false;
    buffers[k].shadow = shadow;
    buffers[k].initialized = kinds[k] == 'C' || kinds[k] == 'U';
  }
  return true;
}

static void check_results(const char* kinds) {
  for (int k = 0; k < now->buffer_count && !now->failed; k++) {
    const Region* r = now->buffers + k;
    if (kinds[k] != 'O') continue;
    long long missing = 0, first = -1;
    for (long long e = 0; e < r->bytes / r->element; e++)
      if (!((const Shadow*)r->shadow)[e].written && !missing++) first = e;
    if (!missing) continue;
    now->failed = true;
    now->report[0] = 0;
    put("kernel %s: %lld of %lld elements of %s were never written, first index %lld", now->name, missing,
        r->bytes / r->element, r->name, first);
  }
}

static void release(Launch* l) {
  for (long long k = 0; k < l->past_count; k++)
    for (Publication *p = l->past[k].publications, *before; p; p = before) {
      before = p->before;
      free(p);
    }
  for (int k = 0; k < l->shared_count; k++) free(l->shared[k].region.shadow);
  for (int k = 0; k < l->buffer_count; k++)
    if (l->buffers[k].shadow) munmap(l->buffers[k].shadow, shadow_bytes(l->buffers + k));
  free(l->acquisitions);
  free(l->past);
  free(l->fibers);
  free(l);
}

static int run(Launch* l, const char* kinds, long long first, long long number) {
  Stacks* stacks = take_stacks(l->threads);
  l->machine = &the_machine;
  l->fibers = (Fiber*)calloc((size_t)l->threads, sizeof(Fiber));
  l->past = (PastBlock*)calloc((size_t)number + 1, sizeof(PastBlock));
  long long* order = (long long*)malloc((size_t)(number + 1) * sizeof *order);
  if (!stacks || !l->fibers || !l->past || !order || !add_shadows(l->buffers, l->buffer_count, kinds)) {
    snprintf(l->report, (size_t)l->report_size, "no memory for a launch of %lld blocks", number);
    free(order);
    if (stacks) exchange_stacks(stacks, 0);
    return 2;
  }
  for (int t = 0; t < l->threads; t++) {
    l->fibers[t].index = t;
    l->fibers[t].stack = stacks->memory + (size_t)t * (STACK + PAGE) + PAGE;
  }
  for (long long k = 0; k < number; k++) order[k] = first + k;
  if (l->random)
    for (long long k = number - 1; k > 0; k--) {
      const long long other = (long long)draw((unsigned long long)k + 1), block = order[k];
      order[k] = order[other];
      order[other] = block;
    }
  for (long long k = 0; k < number && !l->failed; k++) run_block(order[k]);
  if (!l->failed && number == l->blocks) check_results(kinds);
  free(order);
  exchange_stacks(stacks, 0);
  return l->failed;
}

}  // namespace simt

// Runs blocks first, ..., first + number - 1 of a launch of `blocks` blocks. `kinds` has a letter for each buffer: I (only
// read), O (a result: every element is to be written), U (a result that holds values already), S (scratch), C (counters).
// Seed 0 is the natural order. 0: all is well; 1: `report` says what is wrong; 2: it could not run.
extern "C" int hlofuse_simt_run(simt::Entry* entry, const char* name, const char* text, long long blocks, int threads,
                                simt::Region* buffers, int count, const char* kinds, unsigned long long seed,
                                long long first, long long number, char* report, int report_size) {
  simt::Launch* l = (simt::Launch*)calloc(1, sizeof(simt::Launch));
  simt::Launch* outer = simt::now;
  if (!l || threads < 1 || threads > simt::MAX_THREADS) {
    snprintf(report, (size_t)report_size, "a block of %d threads", threads);
    free(l);
    return 2;
  }
  l->entry = entry;
  l->name = name;
  l->text = text;
  l->blocks = blocks;
  l->threads = threads;
  l->buffers = buffers;
  l->buffer_count = count;
  l->random = seed * 0x9e3779b97f4a7c15ull;
  l->report = report;
  l->report_size = report_size;
  report[0] = 0;
  simt::now = l;
#ifdef __SSE__
  // XLA's threads flush subnormal numbers to zero; the GPU does not.
  const unsigned control = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(0x1f80);
#endif
  stack_t signal_stack = {}, earlier_stack;
  signal_stack.ss_sp = malloc(simt::SIGNAL_STACK);
  signal_stack.ss_size = simt::SIGNAL_STACK;
  sigaltstack(&signal_stack, &earlier_stack);
  simt::catch_signals(1);
  const int result = simt::run(l, kinds, first, number);
  simt::catch_signals(-1);
  sigaltstack(&earlier_stack, nullptr);
  free(signal_stack.ss_sp);
#ifdef __SSE__
  __builtin_ia32_ldmxcsr(control);
#endif
  simt::release(l);
  simt::now = outer;
  return result;
}
