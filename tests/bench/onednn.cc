#include "tests/bench/onednn.h"

#include <omp.h>

#include <oneapi/dnnl/dnnl.hpp>
#include <vector>

#include "proto/vocab/random.h"
#include "tests/bench/ceilings.h"

namespace weft::bench {

double onednn_bf16_gflops(int64_t m, int64_t n, int64_t k, int threads, double seconds) {
  using dnnl::memory;
  ::omp_set_num_threads(threads);
  try {
    const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
    dnnl::stream stream(engine);
    constexpr auto kBf16 = memory::data_type::bf16;
    const memory::desc x_desc({m, k}, kBf16, memory::format_tag::ab);
    const memory::desc y_desc({m, n}, memory::data_type::f32, memory::format_tag::ab);
    const dnnl::matmul::desc product(x_desc, {{k, n}, kBf16, memory::format_tag::any}, y_desc);
    const dnnl::matmul::primitive_desc chosen(product, engine);
    // Values around one, in either layout alike.
    memory x(x_desc, engine), w(chosen.weights_desc(), engine), y(y_desc, engine);
    SplitMix64 random(5);
    for (const memory& operand : {x, w}) {
      auto* halves = static_cast<uint16_t*>(operand.get_data_handle());
      for (size_t i = 0; i < operand.get_desc().get_size() / 2; ++i) {
        halves[i] = static_cast<uint16_t>(0x3f00u | (random.next() & 0x80ffu));
      }
    }
    dnnl::matmul matmul(chosen);
    const double best = best_seconds(
        seconds,
        [&] {
          matmul.execute(stream, {{DNNL_ARG_SRC, x}, {DNNL_ARG_WEIGHTS, w}, {DNNL_ARG_DST, y}});
          stream.wait();
        },
        threads);
    return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k) / best * 1e-9;
  } catch (const dnnl::error&) {
    return 0;
  }
}

}  // namespace weft::bench
