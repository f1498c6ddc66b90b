// memfit-train: the verbs of memfit that need LibTorch. `memfit inspect ...` starts it with the same words.
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <set>
#include <string>
#include <vector>

#include "memfit/core/error.h"
#include "memfit/train_cli/config_file.h"
#include "memfit/train_cli/verbs.h"

namespace memfit::train_cli {
namespace {

int finish(const CLI::App& app, ExitStatus status, const std::string& text) {
  const auto verbs = app.get_subcommands();
  const std::string who = verbs.empty() ? "memfit" : "memfit " + verbs.front()->get_name();
  fmt::print(stderr, "{}: {}\n", who, text);
  if (status == ExitStatus::Usage) fmt::print(stderr, "Help: {} --help\n", who);
  return static_cast<int>(status);
}

std::vector<std::string> with_flags_of_file(const CLI::App& app, const std::vector<std::string>& words) {
  std::set<std::string> flags, values;
  for (const CLI::Option* option : app.get_subcommand("train")->get_options()) {
    for (const std::string& name : option->get_lnames()) (option->get_items_expected_max() == 0 ? flags : values).insert(name);
  }
  return with_config(words, flags, values);
}

int run_main(int argc, char** argv) {
  CLI::App app("The verbs of memfit that need LibTorch; start them as `memfit VERB`", "memfit");
  app.require_subcommand(1);
  add_inspect(app);
  add_train(app);
  add_export(app);
  try {
    std::vector<std::string> words(argv + 1, argv + argc);
    if (!words.empty() && words[0] == "train") words = with_flags_of_file(app, words);
    std::ranges::reverse(words);  // as CLI11 takes them
    app.parse(words);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    return finish(app, ExitStatus::Usage, error.what());
  } catch (const Interrupted& error) {
    fmt::print(stderr, "memfit train: {}\n", error.what());
    return 130;
  } catch (const Error& error) {
    return finish(app, error.status(), error.what());
  } catch (const c10::OutOfMemoryError& error) {
    return finish(app, ExitStatus::DoesNotFit, error.what_without_backtrace());
  } catch (const c10::Error& error) {
    return finish(app, ExitStatus::Failed, error.what_without_backtrace());
  } catch (const std::exception& error) {
    return finish(app, ExitStatus::Failed, error.what());
  }
  return 0;
}

}  // namespace
}  // namespace memfit::train_cli

int main(int argc, char** argv) { return memfit::train_cli::run_main(argc, argv); }
