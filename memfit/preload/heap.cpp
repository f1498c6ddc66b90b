// libmemfit_heap.so: preloaded beside libmemfit_preload.so where `--memory` limits resident memory. Tells the engine of
// each large request for memory that is no tensor before it is granted, so that tensors can make room first. Not here:
// what the engine does about it; tensors, which come from the engine's own allocator. Threads: any. Cost: one
// comparison a request, for large ones one call of the engine.
//
// Note [whose heap]
// Requests are passed on to the next malloc in the order of the loader and not to that of libc: a program may have
// another one (jemalloc, tcmalloc), and since this library does not define free(), every block goes back to the heap
// that made it.
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#include <atomic>

#define MEMFIT_EXPORT extern "C" __attribute__((visibility("default")))

// glibc's own heap, for the first requests of all: the loader may allocate while it looks the others up.
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* old, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);
}

namespace memfit::preload {
namespace {

// Smaller requests are many and add up slowly; the engine sees them in the resident memory that it measures.
constexpr size_t kLarge = 256 * 1024;

using Hook = void (*)(size_t bytes);
std::atomic<Hook> hook{nullptr};
__thread bool in_hook = false;  // what the engine itself asks for while it makes room
__thread bool resolving = false;

inline void before(size_t bytes) {
  if (__builtin_expect(bytes < kLarge, true)) return;
  const Hook call = hook.load(std::memory_order_acquire);
  if (call == nullptr || in_hook) return;
  in_hook = true;
  call(bytes);
  in_hook = false;
}

/// A function of the next library in the loader's order, looked up once. Constant-initialised: works before any
/// constructor.
template <typename Function>
class Next {
 public:
  constexpr Next(const char* name, Function first) : name_(name), first_(first) {}
  Function get() {
    const Function function = found_.load(std::memory_order_relaxed);
    return __builtin_expect(function != nullptr, true) ? function : look_up();
  }

 private:
  __attribute__((noinline)) Function look_up() {
    if (resolving) return first_;
    resolving = true;
    const int saved = errno;
    auto function = reinterpret_cast<Function>(dlsym(RTLD_NEXT, name_));
    errno = saved;
    resolving = false;
    if (function == nullptr) function = first_;
    found_.store(function, std::memory_order_relaxed);
    return function;
  }

  const char* name_;
  Function first_;
  std::atomic<Function> found_{nullptr};
};

int no_posix_memalign(void** block, size_t alignment, size_t bytes) {
  *block = __libc_memalign(alignment, bytes);
  return *block != nullptr ? 0 : ENOMEM;
}

void* no_mmap(void*, size_t, int, int, int, off_t) {
  errno = ENOSYS;
  return MAP_FAILED;
}

constinit Next<void* (*)(size_t)> next_malloc("malloc", __libc_malloc);
constinit Next<void* (*)(size_t, size_t)> next_calloc("calloc", __libc_calloc);
constinit Next<void* (*)(void*, size_t)> next_realloc("realloc", __libc_realloc);
constinit Next<void* (*)(size_t, size_t)> next_memalign("memalign", __libc_memalign);
constinit Next<void* (*)(size_t, size_t)> next_aligned_alloc("aligned_alloc", __libc_memalign);
constinit Next<int (*)(void**, size_t, size_t)> next_posix_memalign("posix_memalign", no_posix_memalign);
constinit Next<void* (*)(void*, size_t, int, int, int, off_t)> next_mmap("mmap", no_mmap);

/// Memory that will be resident: private, writable, of no file, and not a mere reservation of addresses.
inline bool will_be_resident(int protection, int flags) {
  return (protection & PROT_WRITE) != 0 && (flags & MAP_ANONYMOUS) != 0 && (flags & MAP_NORESERVE) == 0;
}

}  // namespace
}  // namespace memfit::preload

/// `before(bytes)` is called in the thread that asks for `bytes` >= 256 KiB, before it gets them, with whatever locks
/// that thread holds; what it allocates itself is not announced. It must not throw. nullptr: nobody is told any more.
MEMFIT_EXPORT void memfit_preload_set_large_alloc_hook(void (*before)(size_t bytes)) {
  memfit::preload::hook.store(before, std::memory_order_release);
}

using namespace memfit::preload;

MEMFIT_EXPORT void* malloc(size_t bytes) noexcept {
  before(bytes);
  return next_malloc.get()(bytes);
}

MEMFIT_EXPORT void* calloc(size_t count, size_t bytes) noexcept {
  size_t whole;
  if (!__builtin_mul_overflow(count, bytes, &whole)) before(whole);
  return next_calloc.get()(count, bytes);
}

/// The old block lives until its content has been copied, so the new one counts in full.
MEMFIT_EXPORT void* realloc(void* old, size_t bytes) noexcept {
  before(bytes);
  return next_realloc.get()(old, bytes);
}

MEMFIT_EXPORT void* memalign(size_t alignment, size_t bytes) noexcept {
  before(bytes);
  return next_memalign.get()(alignment, bytes);
}

MEMFIT_EXPORT void* aligned_alloc(size_t alignment, size_t bytes) noexcept {
  before(bytes);
  return next_aligned_alloc.get()(alignment, bytes);
}

MEMFIT_EXPORT int posix_memalign(void** block, size_t alignment, size_t bytes) noexcept {
  before(bytes);
  return next_posix_memalign.get()(block, alignment, bytes);
}

MEMFIT_EXPORT void* mmap(void* where, size_t bytes, int protection, int flags, int file, off_t offset) noexcept {
  if (will_be_resident(protection, flags)) before(bytes);
  return next_mmap.get()(where, bytes, protection, flags, file, offset);
}

// One function under two names where off_t has 64 bits.
static_assert(sizeof(off_t) == 8);
MEMFIT_EXPORT void* mmap64(void* where, size_t bytes, int protection, int flags, int file, off_t offset) noexcept {
  return mmap(where, bytes, protection, flags, file, offset);
}
