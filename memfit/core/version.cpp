#include "memfit/core/version.h"

namespace memfit {

std::string_view version() { return MEMFIT_VERSION; }

}  // namespace memfit
