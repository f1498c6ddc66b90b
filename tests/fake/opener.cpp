// Opens a library by its bare name: only the RUNPATH of this very library leads to it.
#include <dlfcn.h>
extern "C" void* fake_open_leaf() {
  void* volatile leaf =
      dlopen("libfake_leaf.so", RTLD_NOW);  // volatile: a call and not a jump, or the caller would be ours
  return leaf;
}
