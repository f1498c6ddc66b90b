// memfit-train: the verbs of memfit that need LibTorch. `memfit inspect ...` starts it with the same words.
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <string>

#include "memfit/core/error.h"
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

int run_main(int argc, char** argv) {
  CLI::App app("The verbs of memfit that need LibTorch; start them as `memfit VERB`", "memfit");
  app.require_subcommand(1);
  add_inspect(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    return finish(app, ExitStatus::Usage, error.what());
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
