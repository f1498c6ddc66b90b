// A library that is only there to be loaded.
extern "C" int fake_library_answer() { return 42; }
