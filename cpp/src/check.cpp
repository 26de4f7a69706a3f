#include "kvspan/check.h"

#include <string_view>

namespace kvspan {

void throw_internal_error(const char* condition, const char* file, int line) {
  std::string_view name(file);
  name = name.substr(name.find_last_of('/') + 1);
  throw InternalError(
      concat("kvspan internal error: ", condition, " is false at ", name, ":", line));
}

}  // namespace kvspan
