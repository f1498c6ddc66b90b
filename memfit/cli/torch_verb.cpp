#include "memfit/cli/torch_verb.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <vector>

#include "memfit/core/error.h"

namespace memfit::cli {
namespace {

[[noreturn]] void hand_over(const std::string& name, std::vector<std::string> words) {
  std::error_code error;
  const std::filesystem::path binary = std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / "memfit-train";
  words.insert(words.begin(), {binary.string(), name});
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  ::execv(binary.c_str(), arguments.data());
  throw Error(ExitStatus::Failed, fmt::format("{} cannot be started ({}). The verb {} needs LibTorch: build memfit with it (scripts/setup.sh), and keep "
                                              "memfit-train beside memfit.", binary.string(), std::strerror(errno), name));
}

}  // namespace

void add_torch_verb(CLI::App& app, const std::string& name, const std::string& what) {
  CLI::App* verb = app.add_subcommand(name, what);
  verb->prefix_command();
  verb->set_help_flag();  // memfit-train prints the help
  verb->callback([verb, name] { hand_over(name, verb->remaining()); });
}

}  // namespace memfit::cli
