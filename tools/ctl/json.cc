#include "tools/ctl/json.h"

#include <google/protobuf/descriptor.h>

namespace weft::ctl {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

Json bytes_or_text(const FieldDescriptor& field, const std::string& value) {
  return field.type() == FieldDescriptor::TYPE_BYTES ? Json(hex(value)) : Json(value);
}

Json single(const Message& message, const FieldDescriptor& field) {
  const auto& r = *message.GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return r.GetInt32(message, &field);
    case FieldDescriptor::CPPTYPE_INT64:
      return r.GetInt64(message, &field);
    case FieldDescriptor::CPPTYPE_UINT32:
      return r.GetUInt32(message, &field);
    case FieldDescriptor::CPPTYPE_UINT64:
      return r.GetUInt64(message, &field);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return r.GetDouble(message, &field);
    case FieldDescriptor::CPPTYPE_FLOAT:
      return r.GetFloat(message, &field);
    case FieldDescriptor::CPPTYPE_BOOL:
      return r.GetBool(message, &field);
    case FieldDescriptor::CPPTYPE_ENUM:
      return r.GetEnumValue(message, &field);
    case FieldDescriptor::CPPTYPE_STRING:
      return bytes_or_text(field, r.GetString(message, &field));
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return r.HasField(message, &field) ? to_json(r.GetMessage(message, &field)) : Json(nullptr);
  }
  return nullptr;
}

Json element(const Message& message, const FieldDescriptor& field, int i) {
  const auto& r = *message.GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return r.GetRepeatedInt32(message, &field, i);
    case FieldDescriptor::CPPTYPE_INT64:
      return r.GetRepeatedInt64(message, &field, i);
    case FieldDescriptor::CPPTYPE_UINT32:
      return r.GetRepeatedUInt32(message, &field, i);
    case FieldDescriptor::CPPTYPE_UINT64:
      return r.GetRepeatedUInt64(message, &field, i);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return r.GetRepeatedDouble(message, &field, i);
    case FieldDescriptor::CPPTYPE_FLOAT:
      return r.GetRepeatedFloat(message, &field, i);
    case FieldDescriptor::CPPTYPE_BOOL:
      return r.GetRepeatedBool(message, &field, i);
    case FieldDescriptor::CPPTYPE_ENUM:
      return r.GetRepeatedEnumValue(message, &field, i);
    case FieldDescriptor::CPPTYPE_STRING:
      return bytes_or_text(field, r.GetRepeatedString(message, &field, i));
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return to_json(r.GetRepeatedMessage(message, &field, i));
  }
  return nullptr;
}

// An error's code is a name here too, as in error documents.
Json wire_error(const Message& message) {
  const auto& r = *message.GetReflection();
  const auto& d = *message.GetDescriptor();
  const int code = r.GetEnumValue(message, d.FindFieldByName("code"));
  return {{"code", error_code_name(static_cast<ErrorCode>(code))},
          {"message", r.GetString(message, d.FindFieldByName("message"))},
          {"field", r.GetString(message, d.FindFieldByName("field"))}};
}

}  // namespace

Json to_json(const Message& message) {
  const auto& descriptor = *message.GetDescriptor();
  if (descriptor.full_name() == "weft.wire.WireError") return wire_error(message);
  Json out = Json::object();
  for (int f = 0; f < descriptor.field_count(); ++f) {
    const FieldDescriptor& field = *descriptor.field(f);
    if (!field.is_repeated()) {
      out[field.name()] = single(message, field);
      continue;
    }
    Json list = Json::array();
    for (int i = 0; i < message.GetReflection()->FieldSize(message, &field); ++i) {
      list.push_back(element(message, field, i));
    }
    out[field.name()] = std::move(list);
  }
  return out;
}

Json error_fields(const Error& error) {
  return {{"code", error_code_name(error.code)}, {"message", error.message}, {"field", error.field}};
}

Json error_document(const Error& error, const std::string& hint, int exit_code) {
  Json fields = error_fields(error);
  fields["hint"] = hint;
  fields["exit"] = exit_code;
  return document("error", std::move(fields));
}

Json document(const std::string& command, Json content) {
  Json out = {{"schema", kJsonSchema}};
  out[command] = std::move(content);
  return out;
}

std::string hex(const std::string& bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (const char byte : bytes) {
    out += kDigits[(static_cast<unsigned char>(byte) >> 4) & 15u];
    out += kDigits[static_cast<unsigned char>(byte) & 15u];
  }
  return out;
}

std::string dump(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

}  // namespace weft::ctl
