// Writes a result to a file so that the file is whole or not there at all.
// Not here: what is written (report/), formats that are written piece by piece (trace/).
// Threads: any, as long as two do not write the same path. Cost: one fsync of the file and one of its folder.
#pragma once

#include <string>
#include <string_view>

namespace memfit {

/// Whether a file that is already there may be replaced (the command line's --force).
enum class Replace { No, Yes };

/// Find out before long work whether write_output_file will be able to write `path`: makes a temporary file beside it
/// and removes it. Throws:   UsageError naming `flag`, the path, the reason and a way out.
void check_output_file(const std::string& path, std::string_view flag, Replace replace);

/// Write `text` to a temporary file beside `path`, bring it to the disk, and give it its name in one step.
/// Throws:   Error (status Failed) naming the path; `path` is then untouched and the temporary file gone.
void write_output_file(const std::string& path, std::string_view text, Replace replace);

/// "run.json" and "rank3" make "run.rank3.json"; a name without an extension gets the word at its end.
std::string path_with_word(const std::string& path, std::string_view word);

}  // namespace memfit
