#include "worker/model/head.h"

#include <sodium.h>

#include <algorithm>
#include <cstring>

#include "kernels/elementwise.h"
#include "kernels/sample.h"
#include "worker/model/hash_logits.h"

namespace weft::worker {

Result<void> Head::run(const wire::StepPlan& plan, wire::StepResult& result) {
  const std::span<const HeadRow> rows = state_.layout.head_rows();
  return run(rows, state_.weights.final_norm, [&](int64_t row, const float* logits) {
    finish_row(rows[static_cast<size_t>(row)], plan, logits, result);
  });
}

Result<void> Head::run(std::span<const HeadRow> rows, const float* norm, const Take& take) {
  for (int64_t begin = 0; begin < std::ssize(rows); begin += kHeadBatch) {
    const auto count = std::min(kHeadBatch, std::ssize(rows) - begin);
    TRY_VOID(batch(rows.subspan(static_cast<size_t>(begin), static_cast<size_t>(count)), norm,
                   [&](int64_t row, const float* logits) { take(begin + row, logits); }));
  }
  return {};
}

Result<void> Head::gather(std::span<const HeadRow> rows, const float* norm) {
  const int64_t d = state_.config.hidden;
  const bool exchanged = passes_head_rows(rows);
  float* outbox = exchanged ? state_.outbox() : nullptr;
  std::vector<int64_t> home_of(static_cast<size_t>(state_.layout.row_count()), -1);
  for (int64_t i = 0; i < state_.home_count(); ++i) {
    home_of[static_cast<size_t>(state_.home()[static_cast<size_t>(i)].global)] = i;
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t home = home_of[static_cast<size_t>(rows[i].global)];
    if (home < 0) continue;
    float* out = hidden_.data() + static_cast<int64_t>(i) * d;
    kernels::rms_norm(state_.x.data() + home * d, d, norm, state_.config.rms_eps, 1, d, out, d);
    if (exchanged && rows[i].provider == state_.rank) {
      std::memcpy(outbox, out, static_cast<size_t>(d) * sizeof(float));
      outbox += d;
    }
  }
  if (!exchanged) return {};
  TRY_VOID(state_.exchange.pass(ExchangePoint::kHeadRows, -1));
  std::vector<int64_t> taken(static_cast<size_t>(state_.rank_count), 0);
  for (size_t i = 0; i < rows.size(); ++i) {
    const int from = rows[i].provider;
    if (from < 0) continue;
    const int64_t at = taken[static_cast<size_t>(from)]++;
    if (from == state_.rank) continue;
    std::memcpy(hidden_.data() + static_cast<int64_t>(i) * d, state_.inbox(from) + at * d,
                static_cast<size_t>(d) * sizeof(float));
    state_.count(rows[i].span, kv::CrossKind::kRows, d * static_cast<int64_t>(sizeof(float)));
  }
  return {};
}

Result<void> Head::batch(std::span<const HeadRow> rows, const float* norm, const Take& take) {
  const ModelConfig& config = state_.config;
  const auto count = std::ssize(rows);
  scratch(hidden_, count * config.hidden);
  TRY_VOID(gather(rows, norm));

  const kv::Range own = vocabulary_slice(config.vocabulary, state_.rank, state_.rank_count);
  const bool exchanged = state_.layout.passes_logits();
  float* out = exchanged ? state_.outbox() : scratch(slice_, count * config.vocabulary);
  if (!own.empty()) slice(count, own, out);
  if (exchanged) TRY_VOID(state_.exchange.pass(ExchangePoint::kLogits, -1));
  scratch(logits_, config.vocabulary);
  for (int64_t i = 0; i < count; ++i) {
    const HeadRow& row = rows[static_cast<size_t>(i)];
    if (row.sampler != state_.rank) continue;
    if (!exchanged) {
      take(i, out + i * config.vocabulary);
      continue;
    }
    for (int from = 0; from < state_.rank_count; ++from) {
      const kv::Range slice = vocabulary_slice(config.vocabulary, from, state_.rank_count);
      const auto bytes = slice.size() * static_cast<int64_t>(sizeof(float));
      std::memcpy(logits_.data() + slice.begin, state_.inbox(from) + i * slice.size(),
                  static_cast<size_t>(bytes));
      if (from != state_.rank) state_.count(row.span, kv::CrossKind::kRows, bytes);
    }
    take(i, logits_.data());
  }
  return {};
}

void Head::slice(int64_t rows, kv::Range columns, float* out) {
  const int64_t d = state_.config.hidden;
  if (state_.config.hash) {
    for (int64_t i = 0; i < rows; ++i)
      hash_logits(*state_.config.hash, hidden_.data() + i * d, columns, out + i * columns.size());
    return;
  }
  kernels::Gemm p;
  p.weights = state_.weights.head;
  p.output_begin = columns.begin;
  p.output_end = columns.end;
  p.rows = rows;
  p.x = operand_.of(state_.parallel, p.weights.dtype, hidden_.data(), rows * d);
  p.x_stride = d;
  p.y = out;
  p.y_stride = columns.size();
  kernels::gemm(p, state_.parallel);
}

void Head::finish_row(const HeadRow& row, const wire::StepPlan& plan, const float* logits,
                      wire::StepResult& result) {
  const int64_t vocabulary = state_.config.vocabulary;
  const wire::Span& span = plan.spans(row.span);
  if (state_.setup.on_logits) {
    state_.setup.on_logits(span.request(), row.position, {logits, static_cast<size_t>(vocabulary)});
  }
  if (row.digest) {
    unsigned char digest[crypto_hash_sha256_BYTES];
    crypto_hash_sha256(digest, reinterpret_cast<const unsigned char*>(logits),
                       static_cast<unsigned long long>(vocabulary) * sizeof(float));
    wire::Digest* out = result.add_digests();
    out->set_request(span.request());
    out->set_position(static_cast<uint64_t>(row.position));
    out->set_sha256(digest, sizeof digest);
  }
  if (row.sample >= 0) draw(plan, row.span, static_cast<uint32_t>(row.sample), row.position, logits, result);
}

void Head::draw(const wire::StepPlan& plan, int index, uint32_t cell, int64_t position, const float* logits,
                wire::StepResult& result) {
  const int64_t vocabulary = state_.config.vocabulary;
  const wire::Span& span = plan.spans(index);
  wire::SampledToken* out = result.add_samples();
  out->set_span(static_cast<uint32_t>(index));
  out->set_sample_index(cell);
  if (!kernels::all_finite(logits, vocabulary)) {
    // The request will fail; a later row that names this token still needs one.
    out->set_not_finite(true);
    state_.setup.control->write_token(StepId{plan.step()}, cell, 0);
    return;
  }
  kernels::Sampler sampler;
  sampler.temperature = span.sampling().temperature();
  sampler.top_k = span.sampling().top_k();
  sampler.top_p = span.sampling().top_p();
  sampler.seed = span.sampling().seed();
  const uint32_t token = kernels::sample(sampler, logits, vocabulary, static_cast<uint64_t>(position));
  out->set_token(token);
  state_.setup.control->write_token(StepId{plan.step()}, cell, token);
}

}  // namespace weft::worker
