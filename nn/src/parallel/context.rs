//! Context parallelism: sequences cut over the ranks of a group, of which attention sees the whole.

use std::{
    fmt,
    hash::{DefaultHasher, Hash, Hasher},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use autograd::Var;
use numcore::{
    DType, Error, Result, Runtime,
    fused::{NnOps, Reduction, SdpaOptions},
    ops::{Apply, PointwiseOps, ReduceOps, ViewOps},
};
use parking_lot::RwLock;

use super::{SequencePart, VocabularyLoss};
use crate::{Module, ModuleEntry, Visitor, walk};

/// The ranks that sequences are cut over, seen from one of them. All ranks have the same parameters, are given the same examples, and make
/// the same calls in the same order.
pub trait ContextGroup<R: Runtime>: Send + Sync + fmt::Debug {
    /// How many ranks there are.
    fn size(&self) -> usize;
    /// Which of so many tokens are here; an error with the numbers where they cannot be shared out.
    fn part(&self, tokens: usize) -> Result<SequencePart>;
    /// The attention of the queries here, `[B, H, T/c, D]`, over the keys and values of all ranks, of which those here are
    /// `[B, G, T/c, D]`; `of` is the layer that asks, by which calls are told apart. The result is differentiable. An error with the shapes
    /// for options that are not possible where sequences are cut.
    fn attention(&self, qkv: [&Var<R>; 3], options: ContextAttention<'_, R>, of: &str) -> Result<Var<R>>;
    /// An error on every rank, unless all give the same bytes; `what` is the subject of its sentence.
    fn agree(&self, what: &str, own: &[u8]) -> Result<()>;
}

/// Options of the attention of a sequence that is cut over ranks.
#[derive(Debug)]
pub struct ContextAttention<'a, R: Runtime> {
    /// A query sees no key after its own position.
    pub causal: bool,
    /// How many keys before and after its own position a query sees, if not all.
    pub window: (Option<usize>, Option<usize>),
    /// The factor of the scores; `1/√D` if not given.
    pub scale: Option<f64>,
    /// `c`: scaled scores become `c · tanh(score / c)`.
    pub softcap: Option<f64>,
    /// Which document of its row each token of the whole sequence is from, `[B, T]` (`i64`): tokens see no other.
    pub segments: Option<&'a Var<R>>,
}

/// What a module does with sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ContextRole {
    /// It is given whole sequences, and takes this rank's part of them.
    Cuts,
    /// It is given parts, and sees the whole through the group.
    Attends,
    /// It needs all of the sequence, and cannot have it.
    Refuses,
}

/// The place in a module for the ranks that sequences are cut over, empty at first. A clone is the same place.
///
/// A model whose sequences can be cut has one made by [`cuts`](ContextSlot::cuts), and takes its part of tokens, positions and targets by it;
/// a layer in it that looks at other tokens has one made by [`attends`](ContextSlot::attends), or by [`refuses`](ContextSlot::refuses).
/// Everything else works on each token by itself. [`cut_sequences`] fills all places of a model.
pub struct ContextSlot<R: Runtime>(Arc<SlotState<R>>);

struct SlotState<R: Runtime> {
    role: ContextRole,
    place: RwLock<Option<Arc<ContextPlace<R>>>>,
}

/// The group, and the name of the module that has it.
struct ContextPlace<R: Runtime> {
    group: Arc<dyn ContextGroup<R>>,
    of: Box<str>,
    /// Whether all ranks were found to be given the same tokens, once.
    agreed: AtomicBool,
}

impl<R: Runtime> ContextSlot<R> {
    fn new(role: ContextRole) -> Self {
        ContextSlot(Arc::new(SlotState { role, place: RwLock::default() }))
    }

    /// The place in a model that is given whole sequences, and takes this rank's part of them. It is a promise about `forward`: every value
    /// that has tokens is cut, and nothing but modules with places of their own looks at other tokens.
    pub fn cuts() -> Self {
        Self::new(ContextRole::Cuts)
    }

    /// The place in a layer whose attention is that of [`attention`](ContextSlot::attention).
    pub fn attends() -> Self {
        Self::new(ContextRole::Attends)
    }

    /// The place in a layer that needs all of a sequence and computes on what it is given: a model with it cannot be cut.
    pub fn refuses() -> Self {
        Self::new(ContextRole::Refuses)
    }

    fn place(&self) -> Option<Arc<ContextPlace<R>>> {
        self.0.place.read().clone()
    }

    /// How many ranks sequences are cut over: 1, if they are whole.
    pub fn ranks(&self) -> usize {
        self.place().map_or(1, |place| place.group.size())
    }

    /// Which of so many tokens are here.
    ///
    /// # Errors
    /// If they cannot be shared out among the ranks.
    pub fn part(&self, tokens: usize) -> Result<SequencePart> {
        self.place().map_or_else(|| Ok(SequencePart::whole(tokens)), |place| place.group.part(tokens))
    }

    /// What is here of a value with all tokens of a sequence along `dim`: targets, for a loss of one's own.
    ///
    /// # Errors
    /// If there is no such dimension, or its tokens cannot be shared out among the ranks.
    #[track_caller]
    pub fn take<T: Apply>(&self, x: &T, dim: usize) -> Result<T> {
        match (self.place(), x.spec().shape.dims().get(dim)) {
            (None, _) => Ok(x.clone()),
            (Some(place), Some(&tokens)) => place.group.part(tokens)?.take(x, dim),
            (Some(_), None) => {
                Err(Error::shape("context parallelism", &[x.spec().shape], format!("there is no dimension {dim}")))
            }
        }
    }

    /// What is here of the tokens of whole sequences, `[B, T]`, as [`take`](ContextSlot::take) gives it. The first call compares those of all ranks,
    /// and comes before parameters are read.
    ///
    /// # Errors
    /// As [`take`](ContextSlot::take); and on every rank, if ranks along context were given different tokens.
    #[track_caller]
    pub fn take_tokens(&self, tokens: &Var<R>) -> Result<Var<R>> {
        if let Some(place) = self.place().filter(|place| !place.agreed.load(Ordering::Relaxed)) {
            let mut hasher = DefaultHasher::new();
            (&tokens.spec().shape[..], tokens.value()?.to_vec::<i64>()?).hash(&mut hasher);
            let what = "the batch of tokens, which ranks along context share: shares are those of `Mesh::batch`; that";
            place.group.agree(what, &hasher.finish().to_le_bytes())?;
            place.agreed.store(true, Ordering::Relaxed);
        }
        self.take(tokens, 1)
    }

    /// What a sum over the tokens here is in a loss that stands for whole sequences, as [`loss`](ContextSlot::loss) does: times the number of
    /// ranks. Every sum over tokens that is added to such a loss goes through it: a loss of one's own, a penalty on activations, the
    /// [balance loss](crate::moe::Routing::balance_loss) of a mixture of experts. What each rank has the whole of, such as a penalty on
    /// parameters, does not.
    pub fn of_whole(&self, sum: &Var<R>) -> Result<Var<R>> {
        match self.ranks() {
            1 => Ok(sum.clone()),
            ranks => sum.mul(ranks as f64),
        }
    }

    /// Where values between layers lie in the sequence, of which so many tokens are here; none where all of it is here. `within` is which
    /// part this is, and of how many, of what this rank would have otherwise ([`Placed::sequence_part`](super::Placed::sequence_part)).
    pub fn part_of_values(&self, here: usize, within: Option<(usize, usize)>) -> Result<Option<SequencePart>> {
        let (k, n) = within.unwrap_or((0, 1));
        let part = self.part(here * n * self.ranks())?.slice(k, n);
        Ok((!part.is_whole()).then_some(part))
    }

    /// The attention of queries `[B, H, T, D]` over keys and values `[B, G, T, D]`: where sequences are cut, over those of all ranks.
    /// `segments`, `[B, T]` (`i64`), says of all tokens of the sequence from which document of its row each is: tokens see no other.
    ///
    /// # Errors
    /// If the sequence is cut, and options ask for what is not possible then; or if it is whole, and segments are not of all queries and keys.
    #[track_caller]
    pub fn attention(
        &self,
        [q, k, v]: [&Var<R>; 3],
        options: SdpaOptions<'_, Var<R>>,
        segments: Option<&Var<R>>,
    ) -> Result<Var<R>> {
        let Some(place) = self.place() else {
            let Some(segments) = segments else { return q.attention_with(k, v, options) };
            let mask = segments_and(options.mask, [q, k], segments)?;
            return q.attention_with(k, v, SdpaOptions { mask: Some(&mask), ..options });
        };
        let SdpaOptions { mask, causal, window, scale, softcap, .. } = options;
        if let Some(mask) = mask {
            let why = format!(
                "`{}` was given a mask, which is of all tokens, and sequences are cut over {} ranks: give segments",
                place.of,
                place.group.size()
            );
            return Err(Error::shape("attention", &[q.spec().shape, k.spec().shape, mask.spec().shape], why));
        }
        place.group.attention([q, k, v], ContextAttention { causal, window, scale, softcap, segments }, &place.of)
    }

    /// The loss of a language model by the tokens here, of targets of whole sequences, `[B, T]`: `of` computes it from those that are here.
    ///
    /// Ranks along context count as data ranks do, so the loss stands for that of the whole sequences: a sum is multiplied by the number of
    /// ranks ([`of_whole`](ContextSlot::of_whole)), and a mean is over all targets that count. The mean of the ranks' losses is that of one
    /// rank, and the weight of a rank's loss is that of whole sequences. Losses of rows are those here.
    pub fn loss(
        &self,
        targets: &Var<R>,
        loss: &VocabularyLoss,
        of: impl FnOnce(&Var<R>, &VocabularyLoss) -> Result<Var<R>>,
    ) -> Result<Var<R>> {
        if self.ranks() == 1 {
            return of(targets, loss);
        }
        let here = self.take(targets, 1)?;
        let as_it_is = |reduction| {
            let mut own = *loss;
            own.cross_entropy.reduction = reduction;
            own
        };
        match loss.cross_entropy.reduction {
            Reduction::None => of(&here, loss),
            Reduction::Sum => self.of_whole(&of(&here, loss)?),
            Reduction::Mean => {
                let rows = of(&here, &as_it_is(Reduction::None))?;
                let count =
                    targets.ne(loss.cross_entropy.ignore_index as f64)?.to_dtype(rows.dtype())?.sum(&[], false)?;
                self.of_whole(&rows.sum(&[], false)?)?.div(&count)
            }
        }
    }
}

/// Whether tokens `[B, T]` and `[B, S]` are of one document: `[B, 1, T, S]`, of `bool`.
pub fn same_segment<T: Apply>(queries: &T, keys: &T) -> Result<T> {
    let (q, k) = (queries.spec(), keys.spec());
    match (&q.shape[..], &k.shape[..]) {
        (&[b, t], &[batch, s]) if b == batch && q.dtype == DType::I64 => {
            queries.reshape([b, 1, t, 1])?.eq(&keys.reshape([b, 1, 1, s])?)
        }
        _ => Err(Error::shape("attention", &[q.shape, k.shape], "segments must be [B, T], of i64")),
    }
}

/// What queries may see by segments and by a mask, `bool` or added to scores.
fn segments_and<R: Runtime>(mask: Option<&Var<R>>, [q, k]: [&Var<R>; 2], segments: &Var<R>) -> Result<Var<R>> {
    let (q, k, of) = (q.spec().shape, k.spec().shape, segments.spec().shape);
    if of.rank() == 2 && q.rank() == 4 && k.rank() == 4 && [q[2], k[2]] != [of[1]; 2] {
        let why = "segments are of all queries and keys: with a cache of keys give a mask";
        return Err(Error::shape("attention", &[q, k, of], why));
    }
    let same = same_segment(segments, segments)?;
    match mask {
        None => Ok(same),
        Some(given) if given.dtype() == DType::Bool => given.logical_and(&same),
        Some(given) => given.masked_fill(&same.logical_not()?, f64::NEG_INFINITY),
    }
}

/// Cuts the sequences of a model over the ranks of a group: each computes on its part, with the parameters of the whole model. Values that are
/// given to the model are those of whole sequences; what it gives is this rank's part.
///
/// On one rank the model is checked, and nothing else happens.
///
/// # Errors
/// If nothing in the model cuts sequences, or attends over ranks, a layer needs the whole of them, or they are cut already. The model is as it
/// was then.
pub fn cut_sequences<R: Runtime>(model: &(impl Module<R> + ?Sized), group: &Arc<dyn ContextGroup<R>>) -> Result<()> {
    cut_sequences_of_part(model, group, ContextRoles::of(model))
}

/// What places for ranks a model has, of which each rank may have a part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContextRoles {
    /// Something takes a rank's part of sequences ([`ContextSlot::cuts`]).
    pub cuts: bool,
    /// Something attends over ranks ([`ContextSlot::attends`]).
    pub attends: bool,
}

impl ContextRoles {
    /// The roles of the places in a model, or in a part of one.
    pub fn of<R: Runtime>(model: &(impl Module<R> + ?Sized)) -> Self {
        let slots = context_slots(model);
        let has = |role| slots.iter().any(|(_, slot)| slot.0.role == role);
        ContextRoles { cuts: has(ContextRole::Cuts), attends: has(ContextRole::Attends) }
    }
}

/// Cuts sequences like [`cut_sequences`], of a part of a model that is spread over ranks; `all` are the roles in all of it.
///
/// # Errors
/// As [`cut_sequences`].
pub fn cut_sequences_of_part<R: Runtime>(
    model: &(impl Module<R> + ?Sized),
    group: &Arc<dyn ContextGroup<R>>,
    all: ContextRoles,
) -> Result<()> {
    let slots = context_slots(model);
    if let Some((name, _)) = slots.iter().find(|(_, slot)| slot.0.role == ContextRole::Refuses) {
        let why = "looks at all tokens of a sequence, and does not know how to where sequences are cut over ranks";
        return Err(Error::state(name.clone(), why));
    }
    if let Some((name, _)) = slots.iter().find(|(_, slot)| slot.ranks() > 1) {
        return Err(Error::state(name.clone(), "has its sequences cut already: a model is cut once"));
    }
    for (has, why) in [
        (all.cuts, "takes a rank's part of a sequence: a model that can has a `ContextSlot::cuts`"),
        (all.attends, "attends over ranks: attention that can goes through a `ContextSlot::attends`"),
    ] {
        if !has {
            return Err(Error::config("context parallelism", "model", format!("nothing in the model {why}")));
        }
    }
    if group.size() > 1 {
        for (name, slot) in slots {
            let place = ContextPlace { group: group.clone(), of: name.into(), agreed: AtomicBool::new(false) };
            *slot.0.place.write() = Some(Arc::new(place));
        }
    }
    Ok(())
}

/// How many ranks the sequences of each place of a model are cut over, by the name of its module: 1, if they are whole.
pub fn context_ranks<R: Runtime>(model: &(impl Module<R> + ?Sized)) -> Vec<(String, usize)> {
    context_slots(model).into_iter().map(|(name, slot)| (name, slot.ranks())).collect()
}

/// All places of a model, with the names of their modules.
fn context_slots<R: Runtime>(model: &(impl Module<R> + ?Sized)) -> Vec<(String, ContextSlot<R>)> {
    let mut slots = Vec::new();
    walk(model, |name, entry| {
        if let ModuleEntry::Context(slot) = entry {
            slots.push((if name.is_empty() { "the model" } else { name }.to_string(), slot.clone()));
        }
    });
    slots
}

impl<R: Runtime> Module<R> for ContextSlot<R> {
    fn visit(&self, _: &str, visitor: &mut dyn Visitor<R>) {
        visitor.context(self);
    }
}

impl<R: Runtime> Clone for ContextSlot<R> {
    fn clone(&self) -> Self {
        ContextSlot(self.0.clone())
    }
}

impl<R: Runtime> fmt::Debug for ContextSlot<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ContextSlot({:?}, {} ranks)", self.0.role, self.ranks())
    }
}
