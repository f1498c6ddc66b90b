#include <iterator>
#include <nlohmann/json.hpp>

#include "memfit/core/error.h"
#include "memfit/snapshot/detail/object_builder.h"
#include "memfit/snapshot/detail/readers.h"

namespace memfit::snapshot::detail {
namespace {

/// Bytes of a ByteSource as the input iterator that the JSON parser wants.
class ByteIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = char;
  ByteIterator() = default;
  explicit ByteIterator(ByteSource* source) : source_(source) { settle(); }
  char operator*() const { return static_cast<char>(*source_->p); }
  ByteIterator& operator++() {
    ++source_->p;
    settle();
    return *this;
  }
  ByteIterator operator++(int) {
    ByteIterator old = *this;
    ++*this;
    return old;
  }
  bool operator==(const ByteIterator& other) const { return source_ == other.source_; }
  bool operator!=(const ByteIterator& other) const { return source_ != other.source_; }

 private:
  void settle() {
    if (!source_->ensure(1)) source_ = nullptr;
  }
  ByteSource* source_ = nullptr;
};

/// JSON's events drive the same machine as a pickle's opcodes.
class JsonEvents : public nlohmann::json_sax<nlohmann::json> {
 public:
  JsonEvents(ByteSource& source, ObjectBuilder& builder) : source_(source), builder_(builder) {}

  bool null() override { return value(Value()); }
  bool boolean(bool b) override { return value(Value(b ? Tag::True : Tag::False, 0)); }
  bool number_integer(number_integer_t n) override {
    builder_.push_integer(n);
    return done();
  }
  bool number_unsigned(number_unsigned_t n) override {
    builder_.push_unsigned(n);
    return done();
  }
  bool number_float(number_float_t n, const string_t&) override {
    builder_.push_float(n);
    return done();
  }
  bool string(string_t& text) override {
    builder_.push_text(text);
    return done();
  }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override {
    open(false);
    return true;
  }
  bool key(string_t& text) override {
    builder_.push_text(text);
    return true;
  }
  bool end_object() override {
    in_list_.pop_back();
    builder_.set_items();
    return done();
  }
  bool start_array(std::size_t) override {
    open(true);
    return true;
  }
  bool end_array() override {
    in_list_.pop_back();
    builder_.appends();
    return done();
  }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    std::string why = error.what();
    if (const auto colon = why.find("syntax error"); colon != std::string::npos) why = why.substr(colon);
    throw BadInput(source_.name(), position, "is not the JSON of a memory snapshot: " + why.substr(0, 200));
  }

 private:
  static constexpr std::size_t kBatch = 1000;
  bool value(Value v) {
    builder_.push(v);
    return done();
  }
  void open(bool list) {
    if (in_list_.size() > 10000) builder_.bad("nests more than ten thousand deep");
    in_list_.push_back(list);
    if (list) builder_.push_list();
    else builder_.push_dict();
    builder_.push_mark();
  }
  /// A value is complete. Long lists move into their list in batches, as a pickle's do.
  bool done() {
    if (!in_list_.empty() && in_list_.back() && builder_.above_mark() >= kBatch) {
      builder_.appends();
      builder_.push_mark();
    }
    return true;
  }
  ByteSource& source_;
  ObjectBuilder& builder_;
  std::vector<bool> in_list_;
};

}  // namespace

void read_json(ByteSource& source, trace::AllocatorSnapshot& out) {
  ObjectBuilder builder(source, out);
  JsonEvents events(source, builder);
  if (!nlohmann::json::sax_parse(ByteIterator(&source), ByteIterator(), &events))
    builder.bad("is not the JSON of a memory snapshot");
  builder.finish();
  out.format = "JSON";
}

}  // namespace memfit::snapshot::detail
