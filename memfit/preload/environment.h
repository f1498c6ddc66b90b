// The environment variables by which `memfit run` talks to the library in the program, and users to both.
// docs/verbs/run.md and record.md say what each means.
#pragma once

namespace memfit::preload {

inline constexpr char kMemory[] = "MEMFIT_MEMORY";
inline constexpr char kTensorMemory[] = "MEMFIT_TENSOR_MEMORY";
inline constexpr char kReport[] = "MEMFIT_REPORT";
inline constexpr char kForce[] = "MEMFIT_FORCE";
inline constexpr char kVerify[] = "MEMFIT_VERIFY";
inline constexpr char kQuiet[] = "MEMFIT_QUIET";
inline constexpr char kRecord[] = "MEMFIT_RECORD";
inline constexpr char kOffload[] = "MEMFIT_OFFLOAD";
inline constexpr char kOffloadLimit[] = "MEMFIT_OFFLOAD_LIMIT";
inline constexpr char kNoPlan[] = "MEMFIT_NO_PLAN";
inline constexpr char kStatusDir[] = "MEMFIT_STATUS_DIR";  // set by memfit run
inline constexpr char kAttached[] = "MEMFIT_ATTACHED";     // set by the process that attached: "<pid>:<RANK or ->"

}  // namespace memfit::preload
