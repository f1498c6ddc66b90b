#include "memfit/train/optimizers.h"

#include <fmt/format.h>

#include <algorithm>

#include "memfit/core/error.h"
#include "memfit/core/nearest.h"
#include "memfit/optim/adafactor.h"
#include "memfit/optim/adam.h"
#include "memfit/optim/lion.h"
#include "memfit/optim/sgd.h"
#include "memfit/train/choice.h"

namespace memfit::train {
namespace {

using optim::ParameterGroup;

optim::CommonOptions common_options(Choice& choice) {
  const std::vector<std::string> known{"full", "bf16", "int8"};
  optim::CommonOptions out;
  const std::string state = choice.text("state").value_or("full");
  if (std::ranges::find(known, state) == known.end()) throw UsageError(fmt::format("--optimizer: state={}. {}", state, known_words(state, known)));
  if (state == "bf16") out.state = optim::StatePrecision::BFloat16Stochastic;
  if (state == "int8") out.state = optim::StatePrecision::Int8Blockwise;
  return out;
}

std::shared_ptr<optim::Optimizer> make_sgd(Choice& choice, std::vector<ParameterGroup> groups) {
  optim::SgdOptions o;
  o.learning_rate = choice.number("lr", o.learning_rate);
  o.momentum = choice.number("momentum", o.momentum);
  o.dampening = choice.number("dampening", o.dampening);
  o.weight_decay = choice.number("weight_decay", o.weight_decay);
  o.nesterov = choice.flag("nesterov").value_or(o.nesterov);
  o.common = common_options(choice);
  choice.done();
  return std::make_shared<optim::Sgd>(std::move(groups), o);
}

std::shared_ptr<optim::Optimizer> make_adam(Choice& choice, std::vector<ParameterGroup> groups) {
  optim::AdamOptions o;
  o.learning_rate = choice.number("lr", o.learning_rate);
  o.beta1 = choice.number("beta1", o.beta1);
  o.beta2 = choice.number("beta2", o.beta2);
  o.epsilon = choice.number("eps", o.epsilon);
  o.weight_decay = choice.number("weight_decay");
  o.amsgrad = choice.flag("amsgrad").value_or(o.amsgrad);
  o.common = common_options(choice);
  choice.done();
  if (choice.name() == "adam") return std::make_shared<optim::Adam>(std::move(groups), o);
  return std::make_shared<optim::AdamW>(std::move(groups), o);
}

std::shared_ptr<optim::Optimizer> make_lion(Choice& choice, std::vector<ParameterGroup> groups) {
  optim::LionOptions o;
  o.learning_rate = choice.number("lr", o.learning_rate);
  o.beta1 = choice.number("beta1", o.beta1);
  o.beta2 = choice.number("beta2", o.beta2);
  o.weight_decay = choice.number("weight_decay", o.weight_decay);
  o.common = common_options(choice);
  choice.done();
  return std::make_shared<optim::Lion>(std::move(groups), o);
}

std::shared_ptr<optim::Optimizer> make_adafactor(Choice& choice, std::vector<ParameterGroup> groups) {
  optim::AdafactorOptions o;
  o.learning_rate = choice.number("lr", o.learning_rate);
  o.beta2_decay = choice.number("beta2_decay", o.beta2_decay);
  o.clip_threshold = choice.number("d", o.clip_threshold);
  o.weight_decay = choice.number("weight_decay", o.weight_decay);
  o.common = common_options(choice);
  choice.done();
  return std::make_shared<optim::Adafactor>(std::move(groups), o);
}

}  // namespace

std::shared_ptr<optim::Optimizer> make_optimizer(const std::string& text, std::vector<optim::NamedTensor> parameters) {
  Choice choice("--optimizer", text, {"sgd", "adam", "adamw", "adafactor", "lion"});
  std::vector<ParameterGroup> groups(1);
  groups[0].parameters = std::move(parameters);
  if (choice.name() == "sgd") return make_sgd(choice, std::move(groups));
  if (choice.name() == "lion") return make_lion(choice, std::move(groups));
  if (choice.name() == "adafactor") return make_adafactor(choice, std::move(groups));
  return make_adam(choice, std::move(groups));
}

Schedule make_schedule(const std::string& text, std::int64_t steps) {
  Choice choice("--schedule", text, {"constant", "linear", "cosine", "staircase"});
  const std::int64_t warmup = choice.whole("warmup").value_or(0);
  if (warmup < 0) throw UsageError(fmt::format("--schedule: warmup={}; it is a number of steps.", warmup));
  Schedule then = constant();
  if (choice.name() == "cosine" || choice.name() == "linear") {
    const std::int64_t length = choice.whole("steps").value_or(std::max<std::int64_t>(1, steps - warmup));
    const double floor = choice.number("floor", 0);
    if (length < 1 || floor < 0 || floor > 1) throw UsageError(fmt::format("--schedule: {}: steps is at least 1, floor a share from 0 to 1.", text));
    then = choice.name() == "cosine" ? cosine(length, floor) : linear(length, floor);
  } else if (choice.name() == "staircase") {
    const std::optional<std::int64_t> every = choice.whole("every");
    if (!every || *every < 1) throw UsageError("--schedule: staircase needs every=STEPS, at least 1.");
    then = staircase(*every, choice.number("factor", 0.1));
  }
  choice.done();
  return warmup > 0 ? linear_warmup(warmup, then) : then;
}

}  // namespace memfit::train
