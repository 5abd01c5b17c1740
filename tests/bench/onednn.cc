#include "tests/bench/onednn.h"

#include <omp.h>

#include <memory>
#include <oneapi/dnnl/dnnl.hpp>

#include "proto/vocab/random.h"

namespace weft::bench {
namespace {

using dnnl::memory;

// Throws dnnl::error where the library cannot.
struct Product {
  Product(int64_t m, int64_t n, int64_t k) : engine(dnnl::engine::kind::cpu, 0), stream(engine) {
    constexpr auto kBf16 = memory::data_type::bf16;
    const memory::desc x_desc({m, k}, kBf16, memory::format_tag::ab);
    const memory::desc y_desc({m, n}, memory::data_type::f32, memory::format_tag::ab);
    const dnnl::matmul::desc product(x_desc, {{k, n}, kBf16, memory::format_tag::any}, y_desc);
    const dnnl::matmul::primitive_desc chosen(product, engine);
    x = memory(x_desc, engine), w = memory(chosen.weights_desc(), engine), y = memory(y_desc, engine);
    // Values around one, in either layout alike.
    SplitMix64 random(5);
    for (const memory& operand : {x, w}) {
      auto* halves = static_cast<uint16_t*>(operand.get_data_handle());
      for (size_t i = 0; i < operand.get_desc().get_size() / 2; ++i) {
        halves[i] = static_cast<uint16_t>(0x3f00u | (random.next() & 0x80ffu));
      }
    }
    matmul = dnnl::matmul(chosen);
  }
  void run() {
    matmul.execute(stream, {{DNNL_ARG_SRC, x}, {DNNL_ARG_WEIGHTS, w}, {DNNL_ARG_DST, y}});
    stream.wait();
  }

  dnnl::engine engine;
  dnnl::stream stream;
  memory x, w, y;
  dnnl::matmul matmul;
};

}  // namespace

std::optional<Contender> onednn_bf16(int64_t m, int64_t n, int64_t k, int threads) {
  ::omp_set_num_threads(threads);  // the library also plans for so many
  try {
    auto product = std::make_shared<Product>(m, n, k);  // shared: a std::function is copied
    product->run();
    return Contender{"oneDNN bf16",
                     2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k),
                     [product, threads] {
                       ::omp_set_num_threads(threads);
                       product->run();
                     }};
  } catch (const dnnl::error&) {
    return std::nullopt;
  }
}

}  // namespace weft::bench
