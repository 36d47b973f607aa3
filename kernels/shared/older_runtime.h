// Lets libraries that are compiled ahead run with the C++ runtime of GCC 8: GCC 11 and newer call a function
// that this runtime does not have. Included before everything else in each source, hence weak.
#include <new>

namespace std {
[[noreturn]] __attribute__((visibility("hidden"), weak)) void __throw_bad_array_new_length() {
  throw bad_array_new_length();
}
}  // namespace std
