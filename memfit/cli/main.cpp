// memfit: one binary, one verb a word. Errors become one message on stderr and the exit status of their kind.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <string_view>

#include "memfit/cli/verbs.h"
#include "memfit/core/error.h"
#include "memfit/core/version.h"

namespace memfit::cli {
namespace {

void add_verbs(CLI::App& app, Context& context) {
#define MEMFIT_ADD_VERB(name) add_##name(app, context);
  MEMFIT_VERBS(MEMFIT_ADD_VERB)
#undef MEMFIT_ADD_VERB
}

/// "memfit" or "memfit run", as far as the command line got.
std::string spoken_name(const CLI::App& app) {
  const auto parsed = app.get_subcommands();
  return parsed.empty() ? "memfit" : "memfit " + parsed.front()->get_name();
}

void complain(const std::string& who, const std::string& text) { fmt::print(stderr, "{}: {}\n", who, text); }

int usage_error(const CLI::App& app, const std::string& text) {
  const std::string who = spoken_name(app);
  complain(who, text);
  fmt::print(stderr, "Help: {} --help\n", who);
  return static_cast<int>(ExitStatus::Usage);
}

/// CLI11 would only say that a verb is missing.
void check_verb(const CLI::App& app, std::string_view word) {
  std::string verbs;
  for (const CLI::App* verb : app.get_subcommands(nullptr)) {
    if (verb->get_name() == word) return;
    verbs += (verbs.empty() ? "" : ", ") + verb->get_name();
  }
  if (!word.starts_with('-'))
    throw UsageError(fmt::format("\"{}\" is not a verb of memfit. Its verbs: {}.", word, verbs));
}

int run_main(int argc, char** argv) {
  Context context;
  CLI::App app("memfit: holds PyTorch programs inside a memory limit and explains where their memory goes", "memfit");
  app.set_version_flag("--version", fmt::format("memfit {}", version()));
  app.require_subcommand(1);
  app.fallthrough(false);
  app.footer(
      "Sizes carry a unit: 512MiB, 2GiB, 80%.\n"
      "Exit status: 0 fine, 1 failed, 2 usage, 3 does not fit, 4 bad input file, 5 device unavailable.");
  add_verbs(app, context);

  // Words after the first "--" belong to a program and are none of our parser's business.
  std::vector<std::string> words;  // as CLI11 takes them: last word first
  int i = 1;
  for (; i < argc && std::string_view(argv[i]) != "--"; ++i) words.insert(words.begin(), argv[i]);
  const bool dashes = i < argc;
  for (++i; i < argc; ++i) context.program.emplace_back(argv[i]);
  // CLI11 calls this when all words are understood and before the callback of the verb.
  app.parse_complete_callback([&] {
    const CLI::App* verb = app.get_subcommands().front();
    if (dashes && std::ranges::find(context.program_verbs, verb) == context.program_verbs.end()) {
      throw UsageError("takes no program after \"--\".");
    }
  });
  try {
    check_verb(app, argc > 1 ? argv[1] : "--");
    app.parse(words);
  } catch (const CLI::Success& help) {
    return app.exit(help);  // --help, --version
  } catch (const CLI::ConversionError& error) {
    // "Could not convert: --from = abc": what converts is a number.
    const std::string_view text = error.what();
    const auto equals = text.find(" = ");
    const auto colon = text.find(": ");
    if (colon == std::string_view::npos || equals == std::string_view::npos || equals < colon) return usage_error(app, error.what());
    const std::string_view option = text.substr(colon + 2, equals - colon - 2);
    return usage_error(app, fmt::format("{0}: \"{1}\" is not a number. Write for example {0} 5.", option, text.substr(equals + 3)).c_str());
  } catch (const CLI::ParseError& error) {
    if (argc == 1) {
      fmt::print(stderr, "{}", app.help());
      return static_cast<int>(ExitStatus::Usage);
    }
    return usage_error(app, error.what());
  } catch (const UsageError& error) {
    return usage_error(app, error.what());
  } catch (const Error& error) {
    complain(spoken_name(app), error.what());
    return static_cast<int>(error.status());
  }
  return context.exit_status;
}

}  // namespace
}  // namespace memfit::cli

int main(int argc, char** argv) {
  try {
    return memfit::cli::run_main(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fputs("memfit: this machine has no memory left.\n", stderr);
  } catch (const std::exception& error) {
    memfit::cli::complain("memfit", error.what());
  }
  return static_cast<int>(memfit::ExitStatus::Failed);
}
