#include "guards/builder/argument_plan.h"

#include <ATen/core/jit_type.h>

#include <optional>

namespace eagercache {
namespace {

std::optional<ArgumentReader> scalar_reader(c10::TypeKind kind) {
  switch (kind) {
    case c10::TypeKind::TensorType:
      return ArgumentReader::kTensor;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return ArgumentReader::kInt;
    case c10::TypeKind::FloatType:
      return ArgumentReader::kFloat;
    case c10::TypeKind::BoolType:
      return ArgumentReader::kBool;
    case c10::TypeKind::NumberType:
      return ArgumentReader::kScalar;
    case c10::TypeKind::StringType:
      return ArgumentReader::kString;
    case c10::TypeKind::ScalarTypeType:
      return ArgumentReader::kScalarType;
    case c10::TypeKind::LayoutType:
      return ArgumentReader::kLayout;
    case c10::TypeKind::MemoryFormatType:
      return ArgumentReader::kMemoryFormat;
    case c10::TypeKind::DeviceObjType:
      return ArgumentReader::kDevice;
    default:
      return std::nullopt;
  }
}

std::optional<ArgumentReader> list_reader(c10::TypeKind element) {
  switch (element) {
    case c10::TypeKind::TensorType:
      return ArgumentReader::kTensorList;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return ArgumentReader::kIntList;
    case c10::TypeKind::FloatType:
      return ArgumentReader::kFloatList;
    case c10::TypeKind::BoolType:
      return ArgumentReader::kBoolList;
    case c10::TypeKind::NumberType:
      return ArgumentReader::kScalarList;
    default:
      return std::nullopt;
  }
}

c10::TypePtr without_optional(c10::TypePtr type) {
  if (auto optional = type->cast<c10::OptionalType>()) {
    return optional->getElementType();
  }
  return type;
}

// The schema's real type tells ScalarType from int; the type that the interpreter sees does not.
std::optional<ArgumentReader> reader_for(const c10::Argument& argument) {
  const c10::TypePtr type = without_optional(argument.real_type());
  if (auto list = type->cast<c10::ListType>()) {
    return list_reader(without_optional(list->getElementType())->kind());
  }
  return scalar_reader(type->kind());
}

}  // namespace

PlanResult make_argument_plan(const c10::FunctionSchema& schema) {
  PlanResult result;
  if (schema.is_vararg()) {
    result.refusal = "its schema takes a variable number of arguments";
    return result;
  }
  for (const c10::Argument& argument : schema.arguments()) {
    const std::optional<ArgumentReader> reader = reader_for(argument);
    if (!reader) {
      result.refusal = "argument '" + argument.name() + "' has type " +
                       argument.real_type()->str() + ", which a key cannot hold";
      return result;
    }
    result.plan.readers.push_back(*reader);
    result.plan.names.push_back(argument.name());
  }
  return result;
}

}  // namespace eagercache
