// Launches an emitted kernel, once for each "N H W" of the command line, on tensors at made-up addresses.
#include "my_conv.hpp"

#include <cstdio>
#include <cstdlib>

int main(int count, char** values) {
  auto const at = [](size_t address) { return reinterpret_cast<void*>(address); };
  try {
    for (int i = 1; i + 2 < count; i += 3)
      my_conv_kernel::launch(0, at(0x50), {at(0x1000), at(0x2000), at(0x3000), at(0x4000), at(0x5000), at(0x6000), at(0x7000)},
                             std::atoi(values[i]), std::atoi(values[i + 1]), std::atoi(values[i + 2]));
  } catch (std::exception const& error) {
    std::fprintf(stderr, "%s", error.what());
    return 1;
  }
}
