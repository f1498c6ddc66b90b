#include "memfit/core/nearest.h"

#include <algorithm>
#include <numeric>

namespace memfit {
namespace {

std::size_t edits(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t changed = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({changed, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string nearest_word(std::string_view word, const std::vector<std::string>& known) {
  constexpr std::size_t kLongest = 200;  // words come from files, too
  std::string best;
  std::size_t fewest = std::max<std::size_t>(1, std::min(word.size(), kLongest) / 2) + 1;
  for (const std::string& candidate : known) {
    const bool begins = word.size() >= 2 && candidate.starts_with(word);  // "cross" for "cross_entropy"
    const std::size_t count = begins ? 1 : edits(word.substr(0, kLongest), std::string_view(candidate).substr(0, kLongest));
    if (count < fewest) {
      fewest = count;
      best = candidate;
    }
  }
  return best;
}

std::string known_words(std::string_view word, const std::vector<std::string>& known) {
  const std::string best = nearest_word(word, known);
  std::string text = best.empty() ? "" : "Did you mean " + best + "? ";
  text += "Known:";
  for (std::size_t i = 0; i < known.size(); ++i) text += (i == 0 ? " " : ", ") + known[i];
  return text + ".";
}

}  // namespace memfit
