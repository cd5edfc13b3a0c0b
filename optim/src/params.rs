//! Parameters in one buffer: an optimizer takes ownership of its leaves' values, and each leaf becomes a view.

use std::sync::{Arc, LazyLock};

use autograd::Leaf;
use numcore::{
    DType, Error, ErrorKind, Flat, FlatLayout, MemoryCategory, Result, Runtime, Scalar, Shape, Tensor,
    ops::update,
    pointwise::{Program, standard::FILL},
};

use crate::{StateSpec, memory::lending, runs::next_run};

/// Parameters of one dtype in one buffer, in the given order, with an `f32` master copy if they are f16 or bf16.
///
/// A leaf stays usable if its value is replaced, for example by a checkpoint loaded into the model. The new value is
/// copied into the buffer before the next update.
pub struct FlatParams<R: Runtime> {
    leaves: Vec<Arc<Leaf<R>>>,
    pub(crate) values: Flat<R>,
    pub(crate) master: Option<Flat<R>>,
}

/// The values of leaves that are not views of the buffer, with their indices.
type Replaced<R> = Vec<(usize, Tensor<R>)>;

impl<R: Runtime> FlatParams<R> {
    /// Moves the leaves' values, all of one floating dtype on one device, into a new buffer.
    ///
    /// # Errors
    /// An error if there are no leaves, or dtypes or devices differ.
    pub fn new(leaves: Vec<Arc<Leaf<R>>>) -> Result<Self> {
        let Some(first) = leaves.first() else {
            return Err(Error::range("FlatParams", "number of parameters", 0usize, "at least 1"));
        };
        let (rt, dtype) = (first.runtime().with_category(MemoryCategory::Activations), first.spec().dtype);
        leaves.iter().try_for_each(|l| fits(l, &rt, dtype))?;
        let layout = FlatLayout::new(dtype, leaves.iter().map(|l| (l.name().to_string(), l.spec().shape)));
        let master =
            is_half(dtype).then(|| Flat::zeros_for(&rt, MemoryCategory::Optimizer, layout.with_dtype(DType::F32)));
        let values = Flat::zeros_for(&rt, MemoryCategory::Parameters, layout)?;
        let mut params = FlatParams { values, master: master.transpose()?, leaves };
        for i in 0..params.len() {
            params.fill(i, &params.leaves[i].value()?)?;
        }
        for i in 0..params.len() {
            params.leaves[i].put(params.values.tensor(i)?)?;
        }
        // Frees the memory of the old values, since no step will request its sizes.
        rt.trim();
        Ok(params)
    }

    /// Copies these parameters in another order into new memory.
    pub(crate) fn permuted(&self, order: &[usize]) -> Result<Self> {
        let mut moved = Self::new(order.iter().map(|&i| self.leaves[i].clone()).collect())?;
        if let (Some(new), Some(old)) = (&mut moved.master, &self.master) {
            order.iter().enumerate().try_for_each(|(k, &i)| new.overwrite(k, &old.tensor(i)?))?;
        }
        Ok(moved)
    }

    /// The parameters, in order.
    pub fn leaves(&self) -> &[Arc<Leaf<R>>] {
        &self.leaves
    }

    /// The number of parameters.
    pub fn len(&self) -> usize {
        self.leaves.len()
    }

    /// Tells whether there are no parameters, which is never the case.
    pub fn is_empty(&self) -> bool {
        self.leaves.is_empty()
    }

    /// The layout of the parameters in their buffer.
    pub fn layout(&self) -> &FlatLayout {
        self.values.layout()
    }

    /// The runtime of the parameters.
    pub fn runtime(&self) -> &R {
        self.values.runtime()
    }

    /// The dtype of the parameters if it is f16 or bf16.
    pub fn half(&self) -> Option<DType> {
        Some(self.layout().dtype()).filter(|&d| is_half(d))
    }

    /// The dtype in which updates are computed: `f32` for half-precision parameters, the parameters' own otherwise.
    pub fn working(&self) -> DType {
        working(self.layout().dtype())
    }

    /// Returns all values as updates see them, gaps included, in one row: the master copy of half-precision parameters.
    /// No update can run until it is dropped.
    pub fn weights(&mut self) -> Result<Tensor<R>> {
        self.adopt()?;
        self.master.as_ref().unwrap_or(&self.values).whole()
    }

    /// Copies values that were replaced in leaves into the buffer. If it fails, leaves keep their values.
    pub fn adopt(&mut self) -> Result<()> {
        let mut is_view = |(i, leaf): (usize, &Arc<Leaf<R>>)| leaf.value().is_ok_and(|v| is_range(&v, &self.values, i));
        if self.leaves.iter().enumerate().all(&mut is_view) {
            return Ok(());
        }
        self.claim()?;
        self.release(|_| false)
    }

    /// Takes the values out of the leaves, so that the buffer can be written. On an error every leaf is unchanged.
    pub(crate) fn claim(&mut self) -> Result<()> {
        if let Some(leaf) = self.leaves.iter().find(|l| !l.is_resident()) {
            return Err(ErrorKind::NotResident { name: leaf.name().to_string() }.into());
        }
        let taken = self.leaves.iter().map(|l| l.take()).enumerate();
        let replaced: Replaced<R> =
            taken.filter_map(|(i, v)| Some((i, v.filter(|v| !is_range(v, &self.values, i))?))).collect();
        let why = "values of parameters were replaced since the last step, and a captured step would take them again in \
                   every launch: take a step before";
        let is_captured = !replaced.is_empty() && self.values.runtime().is_capturing();
        let fits = if is_captured { Err(Error::usage("step", why)) } else { self.sole() };
        let claimed = fits.and_then(|()| replaced.iter().try_for_each(|(i, v)| self.fill(*i, v)));
        claimed.or_else(|e| {
            self.release(|_| false)?;
            replaced.into_iter().try_for_each(|(i, v)| self.leaves[i].put(v))?;
            Err(e)
        })
    }

    /// Returns the values to the leaves; leaves for which `changed` is true get a new version.
    pub(crate) fn release(&self, changed: impl Fn(usize) -> bool) -> Result<()> {
        self.leaves.iter().enumerate().try_for_each(|(i, leaf)| {
            let view = self.values.tensor(i)?;
            if changed(i) { leaf.set(view) } else { leaf.put(view) }
        })
    }

    /// Checks that no value has another holder. The error cannot name the parameter, since all share one buffer.
    fn sole(&mut self) -> Result<()> {
        let shared = |what: String| Error::from(ErrorKind::Shared { op: "step", what });
        if require_sole(&mut self.values).is_err() {
            return Err(shared(one_of("parameter", self.leaves.iter().map(|l| l.name().to_string()))));
        }
        match self.master.as_mut().map(require_sole) {
            Some(Err(_)) => Err(shared("the master copy of the parameters".into())),
            _ => Ok(()),
        }
    }

    /// Copies a value into range `i`, and into the master copy unless that already rounds to it.
    fn fill(&mut self, i: usize, value: &Tensor<R>) -> Result<()> {
        self.values.overwrite(i, value)?;
        let (Some(half), Some(master)) = (self.half(), &mut self.master) else { return Ok(()) };
        lending(&mut [master], |f| f.lend(i), |outs| update(keep(half), &[value], &[], outs))
    }
}

/// The half-precision dtypes, `f16` and `bf16`.
const HALVES: [DType; 2] = [DType::F16, DType::BF16];

/// Keeps a master value that rounds to the parameter, so that loading parameters and master copies in any order is
/// exact.
static KEEP: LazyLock<[Program; 2]> = LazyLock::new(|| {
    HALVES.map(|half| {
        Program::new("keep_master", |[master, value], []| {
            [master.cast(half).eq(value).select(master, value.cast(DType::F32))]
        })
    })
});

/// The program of the new master copy, from the old one and a replaced parameter of dtype `half`.
pub(crate) fn keep(half: DType) -> &'static Program {
    &KEEP[usize::from(half == DType::BF16)]
}

static ROUND: LazyLock<[Program; 2]> =
    LazyLock::new(|| HALVES.map(|half| Program::new("round_master", |[master], []| [master.cast(half)])));

/// The program that rounds a master copy to a parameter of dtype `half`.
pub(crate) fn rounding(half: DType) -> &'static Program {
    &ROUND[usize::from(half == DType::BF16)]
}

/// Creates the state tensor that `state` names of each parameter of a layout; without elements if it names none. State
/// of a parameter's shape in the dtype of updates spans as many elements as the parameter.
pub(crate) fn state_of<R: Runtime>(
    rt: &R,
    layout: &FlatLayout,
    state: impl Fn(usize) -> Option<StateSpec>,
) -> Result<Flat<R>> {
    let specs: Vec<Option<StateSpec>> = (0..layout.len()).map(state).collect();
    let shapes = || (0..layout.len()).map(|i| *layout.range(i).shape());
    let of = |(spec, shape): (&Option<StateSpec>, Shape)| spec.map_or(Shape::from([0]), |own| (own.shape)(&shape));
    let states: Vec<Shape> = specs.iter().zip(shapes()).map(of).collect();
    // Laid out as parameters are: a wider dtype keeps the places.
    let own = match shapes().eq(states.iter().copied()) {
        true => layout.clone(),
        false => FlatLayout::new(layout.dtype(), (0..layout.len()).map(|i| layout.name(i).to_string()).zip(states)),
    };
    let dtype = specs.iter().flatten().find_map(|spec| spec.dtype);
    let own = own.with_dtype(dtype.unwrap_or(working(layout.dtype())));
    let mut flat = Flat::zeros_for(rt, MemoryCategory::Optimizer, own)?;
    let init = |i: usize| specs.get(i).copied().flatten().map_or(0.0, |spec| spec.init);
    // One launch for a run of equal values, gaps included.
    let mut at = 0;
    while let Some(run) = next_run(specs.len(), at, |i| Some(init(i).to_bits())) {
        at = run.end;
        if init(run.start) != 0.0 {
            let value = [Scalar::F64(init(run.start))];
            lending(&mut [&mut flat], |f| f.lend_span(run.clone()), |outs| update(&FILL, &[], &value, outs))?;
        }
    }
    Ok(flat)
}

/// The dtype in which parameters of `dtype` are updated.
pub(crate) fn working(dtype: DType) -> DType {
    if is_half(dtype) { DType::F32 } else { dtype }
}

fn is_half(dtype: DType) -> bool {
    HALVES.contains(&dtype)
}

fn fits<R: Runtime>(leaf: &Leaf<R>, rt: &R, dtype: DType) -> Result<()> {
    let spec = leaf.spec();
    if !spec.dtype.is_float() {
        let why = format!("parameter `{}`: only floating types can be optimized", leaf.name());
        return Err(Error::dtype("FlatParams", &[spec.dtype], why));
    }
    if spec.dtype != dtype {
        let why = format!("parameter `{}` has another dtype than the first; one buffer has one", leaf.name());
        return Err(Error::dtype("FlatParams", &[dtype, spec.dtype], why));
    }
    if leaf.runtime().device() != rt.device() {
        let devices = vec![rt.device(), leaf.runtime().device()];
        return Err(ErrorKind::Device { op: "FlatParams", devices }.into());
    }
    Ok(())
}

fn is_range<R: Runtime>(value: &Tensor<R>, flat: &Flat<R>, i: usize) -> bool {
    flat.tensor(i).is_ok_and(|own| own.shares_memory_with(value) && own.layout() == value.layout())
}

/// Checks that a buffer has no other holder.
pub(crate) fn require_sole<R: Runtime>(flat: &mut Flat<R>) -> Result<()> {
    let whole = flat.lend_whole()?;
    flat.restore(whole)
}

/// Formats "parameter `a`", or "one of the parameters `a`, `b` …" with at most 16 names.
pub(crate) fn one_of(what: &str, names: impl Iterator<Item = String>) -> String {
    const SHOWN: usize = 16;
    let names: Vec<String> = names.collect();
    let shown = names.iter().take(SHOWN).map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ");
    match names.len() {
        1 => format!("{what} {shown}"),
        n if n > SHOWN => format!("one of the {n} {what}s {shown}, …"),
        _ => format!("one of the {what}s {shown}"),
    }
}

/// Tells whether two layouts have equal offsets. Gradients may be of a wider dtype than half-precision parameters; a
/// kernel only needs equal offsets.
pub(crate) fn same_places(a: &FlatLayout, b: &FlatLayout) -> bool {
    let ranges = || a.len() == b.len() && (0..a.len()).all(|i| a.range(i) == b.range(i));
    a == b || (a.numel() == b.numel() && ranges())
}

/// Groups parameters by dtype, in order of first appearance.
pub(crate) fn by_dtype<R: Runtime>(leaves: Vec<Arc<Leaf<R>>>) -> Vec<Vec<Arc<Leaf<R>>>> {
    let mut parts: Vec<(DType, Vec<Arc<Leaf<R>>>)> = Vec::new();
    for leaf in leaves {
        let dtype = leaf.spec().dtype;
        match parts.iter_mut().find(|(d, _)| *d == dtype) {
            Some((_, part)) => part.push(leaf),
            None => parts.push((dtype, vec![leaf])),
        }
    }
    parts.into_iter().map(|(_, part)| part).collect()
}
