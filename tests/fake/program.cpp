// A program for tests of `memfit run`: does what its arguments say, one after the other.
//   say TEXT | cat | env NAME | exit N | raise N | throw | sleep MS
//   heap                      take and give back memory in every way there is, small and large, and check it
//   parent N                  send signal N to the process that started this one
//   dlopen PATH | leaf        open a library (and keep it); open the library that opens its neighbour by a bare name
//   thread | fork             start and join a thread; fork a child that exits at once with 0, and wait for it
//   exec WORD... | spawn WORD...   become, or start and wait for, another program
//   unset NAME | set NAME VALUE
//   count N MS                count signal N until it has been quiet for MS, print how often it came
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <stdexcept>

namespace {

volatile sig_atomic_t counted = 0;

[[noreturn]] void fail(const char* what) {
  fprintf(stderr, "program: %s\n", what);
  exit(99);
}

void* nothing(void*) { return nullptr; }

void open_library(const char* path) {
  if (dlopen(path, RTLD_NOW) == nullptr) fail(dlerror());
  if (dlerror() != nullptr) fail("dlerror after a dlopen that worked");
}

void open_leaf() {
  char path[4096];
  const ssize_t n = readlink("/proc/self/exe", path, sizeof path - 64);
  if (n < 0) fail("readlink");
  path[n] = '\0';
  strcpy(strrchr(path, '/') + 1, "libfake_opener.so");
  void* opener = dlopen(path, RTLD_NOW);
  if (opener == nullptr) fail(dlerror());
  auto open = reinterpret_cast<void* (*)()>(dlsym(opener, "fake_open_leaf"));
  if (open() == nullptr) fail(dlerror());
}

void use(void* block, size_t bytes, size_t alignment = 16) {
  if (block == nullptr || reinterpret_cast<uintptr_t>(block) % alignment != 0) fail("no memory, or not aligned");
  memset(block, 1, bytes);
}

/// Each way of asking, with a size of its own, so that a log tells them apart: 1001 KiB, 1002 KiB and so on.
void use_heap() {
  for (size_t kib : {size_t{1}, size_t{1000}}) {
    const size_t bytes = kib << 10;
    void* volatile block = malloc(bytes + 1024);
    use(block, bytes + 1024);
    block = realloc(block, bytes + 2048);
    use(block, bytes + 2048);
    free(block);
    block = calloc(bytes / 1024 + 3, 1024);
    if (block == nullptr || *static_cast<char*>(block) != 0) fail("calloc");
    use(block, bytes + 3 * 1024);
    free(block);
    block = aligned_alloc(4096, bytes + 4096);
    use(block, bytes + 4096, 4096);
    free(block);
    void* aligned = nullptr;
    if (posix_memalign(&aligned, 64, bytes + 5 * 1024) != 0) fail("posix_memalign");
    use(aligned, bytes + 5 * 1024, 64);
    free(aligned);
    auto* array = new char[bytes + 6 * 1024];
    use(array, bytes + 6 * 1024);
    delete[] array;
    void* pages = mmap(nullptr, bytes + 7 * 1024, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    use(pages, bytes + 7 * 1024, 4096);
    munmap(pages, bytes + 7 * 1024);
    // Addresses only: nothing becomes resident.
    void* addresses = mmap(nullptr, bytes << 10, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    munmap(addresses, bytes << 10);
  }
  volatile size_t too_many = SIZE_MAX / 2;
  if (calloc(too_many, 4) != nullptr) fail("calloc gave what does not exist");
}

void wait_for(pid_t child) {
  int status = 0;
  if (waitpid(child, &status, 0) != child || status != 0) fail("the child failed");
}

void start_thread() {
  pthread_t thread;
  if (pthread_create(&thread, nullptr, nothing, nullptr) != 0) fail("pthread_create");
  pthread_join(thread, nullptr);
}

void fork_child() {
  const pid_t child = fork();
  if (child == 0) exit(0);
  wait_for(child);
}

void spawn(char** words) {
  const pid_t child = fork();
  if (child == 0) {
    execv(words[0], words);
    _exit(98);
  }
  wait_for(child);
}

void count(int signal_number, int quiet_ms) {
  struct sigaction action {};
  action.sa_handler = [](int) { counted = counted + 1; };
  sigaction(signal_number, &action, nullptr);
  puts("ready");
  fflush(stdout);
  for (int before = -1; before != counted || counted == 0;) {
    before = counted;
    for (int ms = 0; ms < quiet_ms; ms += 10) usleep(10'000);
  }
  printf("%d\n", static_cast<int>(counted));
}

}  // namespace

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  for (int i = 1; i < argc; ++i) {
    const char* verb = argv[i];
    auto next = [&] { return ++i < argc ? argv[i] : (fail("an argument is missing"), nullptr); };
    auto is = [&](const char* word) { return strcmp(verb, word) == 0; };
    if (is("say")) puts(next());
    else if (is("cat"))
      for (int c; (c = getchar()) != EOF;) putchar(c);
    else if (is("env")) {
      const char* name = next();
      printf("%s=%s\n", name, getenv(name) ? getenv(name) : "(none)");
    } else if (is("exit")) exit(atoi(next()));
    else if (is("raise")) raise(atoi(next()));
    else if (is("heap")) use_heap();
    else if (is("parent")) kill(getppid(), atoi(next()));
    else if (is("throw")) throw std::runtime_error("out of budget");
    else if (is("sleep")) usleep(static_cast<useconds_t>(atoi(next())) * 1000);
    else if (is("dlopen")) open_library(next());
    else if (is("leaf")) open_leaf();
    else if (is("thread")) start_thread();
    else if (is("fork")) fork_child();
    else if (is("exec")) {
      execv(argv[i + 1], argv + i + 1);
      fail("exec");
    } else if (is("spawn")) {
      spawn(argv + i + 1);
      return 0;
    } else if (is("unset")) unsetenv(next());
    else if (is("set")) {
      const char* name = next();
      setenv(name, next(), 1);
    } else if (is("count")) {
      const int number = atoi(next());
      count(number, atoi(next()));
    } else fail(verb);
  }
  return 0;
}
