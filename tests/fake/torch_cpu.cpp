// Stands for libtorch_cpu.so: all the preload library looks at is its name and its word for its version.
#include <map>
#include <string>

namespace {
bool initialised = false;
struct Initialise {
  Initialise() { initialised = true; }
} initialise;
}  // namespace

namespace caffe2 {
const std::map<std::string, std::string>& GetBuildOptions() {
  static const std::map<std::string, std::string> options = {
      {"BLAS_INFO", "none"}, {"TORCH_VERSION", FAKE_TORCH_VERSION}, {"USE_CUDA", "0"}};
  return options;
}
}  // namespace caffe2

/// Whether this library's static objects exist: the engine must never come before them.
extern "C" bool fake_torch_is_initialised() { return initialised; }
