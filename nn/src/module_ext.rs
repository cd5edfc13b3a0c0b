//! Operations on every model: name, count, freeze, cast, save and load its parts.

use std::{
    collections::{HashMap, HashSet},
    path::Path,
};

use autograd::Var;
use numcore::{DType, Result, Runtime, Tensor, Within, safetensors::Notes};

use crate::{
    Buffer, LoadReport, Module, ModuleEntry, Param, ParameterCount,
    state::{self, ModelState},
    summary::{self, ModuleOutputs, ModuleSummary},
    walk,
};

/// Operations on every model.
pub trait ModuleExt<R: Runtime>: Module<R> {
    /// The parameters with their full names, in the model's order. A shared parameter is listed once, under its first
    /// name.
    ///
    /// Each parameter's leaf takes that name, which errors and checkpoints then show. A part of a model that was named
    /// as a whole leaves the longer names as they are.
    fn named_parameters(&self) -> Vec<(String, Param<R>)> {
        let mut seen = HashSet::new();
        let mut named = Vec::new();
        walk(self, |name, entry| match entry {
            ModuleEntry::Parameter(p) if seen.insert(p.id()) => named.push((name.to_string(), p.clone())),
            _ => {}
        });
        // `fc.weight` is the name of `blocks.0.fc.weight` within its block.
        let of_a_part = |full: &str, name: &str| full.strip_suffix(name).is_some_and(|path| path.ends_with('.'));
        for (name, p) in &named {
            let leaf = p.leaf();
            if !of_a_part(&leaf.name(), name) {
                leaf.rename(name);
            }
        }
        named
    }

    /// The parameters in the model's order, each once.
    fn parameters(&self) -> Vec<Param<R>> {
        self.named_parameters().into_iter().map(|(_, p)| p).collect()
    }

    /// The buffers with their full names, in the model's order, each once.
    fn named_buffers(&self) -> Vec<(String, Buffer<R>)> {
        let mut seen = HashSet::new();
        let mut named = Vec::new();
        walk(self, |name, entry| match entry {
            ModuleEntry::Buffer(b) if seen.insert(b.id()) => named.push((name.to_string(), b.clone())),
            _ => {}
        });
        named
    }

    /// Sets whether the model trains: only then does dropout drop and batch norm update its statistics.
    fn set_training(&self, yes: bool) {
        walk(self, |_, entry| {
            if let ModuleEntry::Mode(mode) = entry {
                mode.set_training(yes);
            }
        });
    }

    /// Switches to training mode.
    fn train(&self) {
        self.set_training(true);
    }

    /// Switches to evaluation mode.
    fn eval(&self) {
        self.set_training(false);
    }

    /// Freezes all parameters: no gradient flows to them.
    fn freeze(&self) {
        self.freeze_where(|_| true);
    }

    /// Unfreezes all parameters: they receive gradients again.
    fn unfreeze(&self) {
        self.unfreeze_where(|_| true);
    }

    /// Freezes the parameters whose full name satisfies `which`: `model.freeze_where(under("encoder"))`.
    fn freeze_where(&self, which: impl Fn(&str) -> bool) {
        set_requires_grad(self, which, false);
    }

    /// Unfreezes the parameters whose full name satisfies `which`.
    fn unfreeze_where(&self, which: impl Fn(&str) -> bool) {
        set_requires_grad(self, which, true);
    }

    /// The number of elements in the model's parameters: of the whole ones, where this rank has pieces.
    fn num_parameters(&self) -> ParameterCount {
        let mut count = ParameterCount::default();
        for p in self.parameters() {
            let numel = p.logical_shape().numel();
            count.total += numel;
            count.trainable += if p.requires_grad() { numel } else { 0 };
        }
        count
    }

    /// A table of the parameters: name, shape, dtype, whether trained, the number of elements, and the totals.
    fn summary(&self) -> String {
        summary::table(&self.named_parameters())
    }

    /// The summary of a forward pass, module by module: shapes, parameters, FLOPs, and the bytes that the tape keeps.
    /// `forward` runs it on inputs of one's own; on a [`NullRuntime`](numcore::NullRuntime) nothing is computed.
    ///
    /// ```
    /// # use autograd::Var;
    /// # use nn::{Forward, Init, Linear, ModuleExt, Relu, Sequential};
    /// # use numcore::{DType, NullRuntime, Tensor};
    /// # fn main() -> numcore::Result<()> {
    /// let rt = NullRuntime::new();
    /// let init = Init::new(&rt, 0);
    /// let model = Sequential::new().push(Linear::new(&init, 8, 16)?).push(Relu).push(Linear::new(&init, 16, 3)?);
    /// let x = Var::new(Tensor::zeros(&rt, [32, 8], DType::F32)?);
    /// let summary = model.summarize(|| model.forward(&x))?;
    /// assert_eq!(summary.modules[0].flops, 2 * 32 * (8 * 16 + 16 * 3));
    /// println!("{summary}");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// What `forward` returns.
    #[doc(alias = "torchinfo")]
    #[track_caller]
    fn summarize(&self, forward: impl FnOnce() -> Result<Var<R>>) -> Result<ModuleSummary> {
        ModuleSummary::of(self, forward)
    }

    /// Runs `forward`, and returns its result with the outputs of the model's modules, by full name in the model's
    /// order. Forward hooks of other frameworks read these.
    ///
    /// A module's output is that of its last op call. Modules are told apart as in [`ModuleSummary`]: one without
    /// parameters counts to the module around it. All outputs of op calls stay in memory until this returns.
    ///
    /// ```
    /// use nn::{Forward, Init, Linear, ModuleExt, Relu, Sequential};
    /// use numcore::{DType, Tensor};
    /// # use autograd::Var;
    /// # use runtime_cpu::Cpu;
    /// # let cpu = Cpu::new();
    /// let init = Init::new(&cpu, 0);
    /// let model = Sequential::new().push(Linear::new(&init, 8, 16)?).push(Relu).push(Linear::new(&init, 16, 3)?);
    /// let x = Var::new(Tensor::ones(&cpu, [2, 8], DType::F32)?);
    /// let (_, outputs) = model.module_outputs(|| model.forward(&x))?;
    /// assert_eq!(outputs.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["", "0", "2"]);
    /// assert_eq!(outputs[1].1.dims(), [2, 16]);
    /// # Ok::<(), numcore::Error>(())
    /// ```
    ///
    /// # Errors
    /// Fails if `forward` fails.
    #[doc(alias("register_forward_hook", "feature extraction", "activations", "create_feature_extractor"))]
    #[track_caller]
    fn module_outputs<T>(&self, forward: impl FnOnce() -> Result<T>) -> Result<(T, ModuleOutputs<R>)> {
        summary::module_outputs(self, forward)
    }

    /// Casts the floating parameters and buffers of the model. Parameters get other leaves: cast before optimizers and
    /// trainers are made.
    #[track_caller]
    fn to_dtype(&self, dtype: DType) -> Result<()> {
        self.to_dtype_where(|_| true, dtype)
    }

    /// Casts the floating parameters and buffers whose full name satisfies `which`, so that parts of a model differ in
    /// dtype: `model.to_dtype_where(under("encoder"), DType::BF16)`. Where such parts meet, cast the activations, or
    /// compute under [`autocast`](autograd::autocast).
    #[track_caller]
    fn to_dtype_where(&self, which: impl Fn(&str) -> bool, dtype: DType) -> Result<()> {
        for (_, p) in self.named_parameters().iter().filter(|(name, p)| which(name) && p.dtype().is_float()) {
            p.to_dtype(dtype)?;
        }
        for (_, b) in self.named_buffers().iter().filter(|(name, b)| which(name) && b.spec().dtype.is_float()) {
            b.to_dtype(dtype)?;
        }
        Ok(())
    }

    /// Takes parameters, buffers and what is trained from a model of the same structure, on another device or on this
    /// one. A model moves between devices by making one there and copying into it. Values keep the dtypes of `other`.
    ///
    /// ```
    /// # use nn::{Init, Linear, ModuleExt};
    /// # use numcore::NullRuntime;
    /// # fn main() -> numcore::Result<()> {
    /// # let (cpu, gpu) = (NullRuntime::new(), NullRuntime::new());
    /// let trained = Linear::new(&Init::new(&cpu, 0), 4, 2)?;
    /// let deployed = Linear::new(&Init::new(&gpu, 0), 4, 2)?;
    /// deployed.copy_from(&trained)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// One error lists every name or shape that differs; nothing is changed then.
    #[doc(alias = "to_device")]
    #[track_caller]
    fn copy_from<S: Runtime>(&self, other: &(impl Module<S> + ?Sized)) -> Result<()> {
        let theirs = other.state_dict()?;
        let own = ModelState::of(self);
        own.check_structure(&theirs)?;
        let trained: HashMap<String, Param<S>> = other.named_parameters().into_iter().collect();
        for (name, p) in self.named_parameters() {
            if let Some(other) = trained.get(&name) {
                p.to_dtype(other.dtype())?;
                p.set_requires_grad(other.requires_grad());
            }
        }
        let buffers: HashMap<String, Buffer<S>> = other.named_buffers().into_iter().collect();
        for (name, b) in self.named_buffers() {
            if let Some(other) = buffers.get(&name) {
                b.to_dtype(other.spec().dtype)?;
            }
        }
        let Some(rt) = own.runtime() else { return Ok(()) };
        let moved = theirs.into_iter().map(|(name, value)| Ok((name, value.to_device(&rt)?)));
        ModelState::of(self).load(moved.collect::<Result<_>>()?, true).map(drop)
    }

    /// An error, with the first parameter's name, if parameters are cut over ranks: for what writes or exports whole
    /// models. A rank has [pieces](Param::placed) of those alone; a checkpoint has all of them.
    fn require_whole(&self) -> Result<()> {
        state::require_whole(&self.named_parameters())
    }

    /// The values of the parameters and buffers by full name, in the model's order. A shared one is listed once, under
    /// its first name. Of a model that is cut over ranks the values are this rank's pieces
    /// ([`require_whole`](ModuleExt::require_whole) tells).
    #[track_caller]
    fn state_dict(&self) -> Result<Vec<(String, Tensor<R>)>> {
        ModelState::of(self).values().at_caller()
    }

    /// Loads values into all parameters and buffers.
    ///
    /// Names, shapes, dtypes and devices must match. One error lists all mismatches, and nothing is changed unless
    /// everything fits. A value whose memory is shared with other tensors is copied.
    #[track_caller]
    fn load_state_dict(&self, values: Vec<(String, Tensor<R>)>) -> Result<()> {
        ModelState::of(self).load(values, true).at_caller().map(drop)
    }

    /// Loads the values whose names the model has. The report lists missing and unexpected names. Fails otherwise as
    /// [`load_state_dict`](ModuleExt::load_state_dict).
    #[doc(alias("strict=False"))]
    #[track_caller]
    fn load_partial_state_dict(&self, values: Vec<(String, Tensor<R>)>) -> Result<LoadReport> {
        ModelState::of(self).load(values, false).at_caller()
    }

    /// Writes the model's state to a safetensors file, which replaces the one at `path` only once it is complete.
    ///
    /// # Errors
    /// If parameters are cut over ranks: a file has whole ones.
    #[track_caller]
    fn save_safetensors(&self, path: impl AsRef<Path>) -> Result<()> {
        self.require_whole().at_caller()?;
        numcore::safetensors::save(path, &self.state_dict()?, &Notes::new()).at_caller()
    }

    /// Loads the model's state from a safetensors file; see [`load_state_dict`](ModuleExt::load_state_dict).
    #[track_caller]
    fn load_safetensors(&self, path: impl AsRef<Path>) -> Result<()> {
        state::load_file(&ModelState::of(self), path.as_ref(), true).at_caller().map(drop)
    }

    /// Loads the tensors of a safetensors file whose names the model has; see
    /// [`load_partial_state_dict`](ModuleExt::load_partial_state_dict).
    #[track_caller]
    fn load_partial_safetensors(&self, path: impl AsRef<Path>) -> Result<LoadReport> {
        state::load_file(&ModelState::of(self), path.as_ref(), false).at_caller()
    }
}

impl<R: Runtime, M: Module<R> + ?Sized> ModuleExt<R> for M {}

/// The test whether a name is `prefix` or is below it: `under("encoder")` accepts `encoder.0.weight`, not
/// `encoder2.weight`.
pub fn under(prefix: &str) -> impl Fn(&str) -> bool {
    move |name| {
        name.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('.') || prefix.is_empty())
    }
}

fn set_requires_grad<R: Runtime>(module: &(impl Module<R> + ?Sized), which: impl Fn(&str) -> bool, yes: bool) {
    walk(module, |name, entry| match entry {
        ModuleEntry::Parameter(p) if which(name) => p.set_requires_grad(yes),
        _ => {}
    });
}
