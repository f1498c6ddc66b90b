// Which memfit this is.
#pragma once

#include <string_view>

namespace memfit {

/// "0.1.0", of the project line in CMakeLists.txt.
std::string_view version();

}  // namespace memfit
