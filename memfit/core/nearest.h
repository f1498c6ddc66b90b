// The known word that a mistyped one was probably meant to be, for messages.
// Threads: any. Cost: the product of the words' lengths.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace memfit {

/// The word of `known` with the fewest edits (Levenshtein distance) from `word`, where they are few enough to have been meant; else "".
std::string nearest_word(std::string_view word, const std::vector<std::string>& known);

/// "Did you mean X? Known: a, b, c." or "Known: a, b, c."
std::string known_words(std::string_view word, const std::vector<std::string>& known);

}  // namespace memfit
