//! Context parallelism: sequences cut over the ranks of a group, with attention over the whole sequence.

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
    Error, Result, Runtime, Tensor,
    fused::{AttentionProgram, NnOps, Reduction, SdpaOptions},
    ops::{Apply, PointwiseOps, ReduceOps},
};
use parking_lot::RwLock;

use super::{
    AttendedTokens, AttentionScores, SequencePart, VocabularyLoss,
    largest_scores::LargestScores,
    segments::{masked, segments_and},
};
use crate::{Module, Visitor};

/// The ranks that sequences are cut over, as one of them sees the group. All ranks have the same parameters, are given
/// the same examples, and make the same calls in the same order.
pub trait ContextGroup<R: Runtime>: Send + Sync + fmt::Debug {
    /// The number of ranks.
    fn size(&self) -> usize;
    /// The part of a sequence of `tokens` tokens on this rank.
    ///
    /// # Errors
    /// An error with the numbers if the tokens cannot be shared out among the ranks.
    fn part(&self, tokens: usize) -> Result<SequencePart>;
    /// Attention of this rank's queries, `[B, H, T/c, D]`, over the keys and values of all ranks. This rank's keys and
    /// values are `[B, G, T/c, D]`; `c` is the number of ranks. `of` names the calling layer, so that its exchanges
    /// differ from those of other layers. The result is differentiable.
    ///
    /// # Errors
    /// An error with the shapes for options that cut sequences do not support.
    fn attention(&self, qkv: [&Var<R>; 3], options: ContextAttention<'_, R>, of: &str) -> Result<Var<R>>;
    /// Compares bytes of all ranks; `what` is the subject of the error's sentence.
    ///
    /// # Errors
    /// An error on every rank, unless all ranks give the same bytes.
    fn agree(&self, what: &str, own: &[u8]) -> Result<()>;
}

/// Options of attention over a sequence that is cut over ranks.
#[derive(Debug)]
pub struct ContextAttention<'a, R: Runtime> {
    /// True if a query sees no key after its own position.
    pub causal: bool,
    /// The numbers of keys before and after its own position that a query sees; all, if `None`.
    pub window: (Option<usize>, Option<usize>),
    /// The factor of the scores; `1/√D` if `None`.
    pub scale: Option<f64>,
    /// The soft cap `c`: scaled scores become `c · tanh(score / c)`.
    pub softcap: Option<f64>,
    /// The number of the document that each token of the whole sequence belongs to, `[B, T]` (`i64`). A token sees only
    /// tokens of its own document.
    pub segments: Option<&'a Var<R>>,
    /// The programs of scores and mask in place of all other options, with their arguments, which are of whole
    /// sequences.
    pub program: Option<(&'a AttentionProgram, &'a [&'a Var<R>])>,
}

impl<R: Runtime> Default for ContextAttention<'_, R> {
    fn default() -> Self {
        let (scale, softcap, segments, program) = (None, None, None, None);
        ContextAttention { causal: false, window: (None, None), scale, softcap, segments, program }
    }
}

/// The way that a module handles cut sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContextRole {
    /// The module is given whole sequences, and takes this rank's part of them.
    Cuts,
    /// The module is given parts, and sees the whole sequence through the group.
    Attends,
    /// The module is given parts, and asks for the places of its tokens in the whole sequence.
    Locates,
    /// The module needs the whole sequence, and does not support cut ones.
    Refuses,
}

/// A place in a module for the group of ranks that sequences are cut over; empty at first. A clone shares the place.
///
/// A model whose sequences can be cut has a slot made by [`cuts`](ContextSlot::cuts), with which it takes its part of
/// tokens, positions and targets. A layer in it that looks at other tokens has one made by
/// [`attends`](ContextSlot::attends), or by [`refuses`](ContextSlot::refuses). A layer for which the order of tokens
/// counts has one made by [`locates`](ContextSlot::locates). All other layers work on each token by itself.
/// [`cut_sequences`](super::cut_sequences) fills all slots of a model.
pub struct ContextSlot<R: Runtime>(Arc<SlotState<R>>);

struct SlotState<R: Runtime> {
    role: ContextRole,
    place: RwLock<Option<Arc<ContextPlace<R>>>>,
    /// The largest score of each head so far; none if it is not observed.
    largest: RwLock<Option<LargestScores<R>>>,
    /// The program of scores; none if they are those of the layer.
    scores: RwLock<Option<Arc<AttentionScores<R>>>>,
}

/// The group, and the name of the module that holds the slot.
struct ContextPlace<R: Runtime> {
    group: Arc<dyn ContextGroup<R>>,
    of: Box<str>,
    /// True once all ranks were found to have the same tokens.
    agreed: AtomicBool,
}

impl<R: Runtime> ContextSlot<R> {
    fn new(role: ContextRole) -> Self {
        let (place, largest, scores) = Default::default();
        ContextSlot(Arc::new(SlotState { role, place, largest, scores }))
    }

    /// Creates the slot of a model that is given whole sequences and takes this rank's part of them. It is a promise
    /// about `forward`: every value with tokens is cut, and only modules with slots of their own look at other tokens.
    pub fn cuts() -> Self {
        Self::new(ContextRole::Cuts)
    }

    /// Creates the slot of a layer that attends by [`attention`](ContextSlot::attention).
    pub fn attends() -> Self {
        Self::new(ContextRole::Attends)
    }

    /// Creates the slot of a layer that works on each token by itself, but asks for its place in the sequence
    /// ([`positions`](ContextSlot::positions)).
    pub fn locates() -> Self {
        Self::new(ContextRole::Locates)
    }

    /// Creates the slot of a layer that needs the whole sequence and computes on its input alone. The sequences of a
    /// model with such a layer cannot be cut.
    pub fn refuses() -> Self {
        Self::new(ContextRole::Refuses)
    }

    pub(super) fn role(&self) -> ContextRole {
        self.0.role
    }

    /// Puts the group into the slot of the module `of`.
    pub(super) fn fill(&self, group: &Arc<dyn ContextGroup<R>>, of: String) {
        let place = ContextPlace { group: group.clone(), of: of.into(), agreed: AtomicBool::new(false) };
        *self.0.place.write() = Some(Arc::new(place));
    }

    /// Tells whether the slot is that of attention.
    pub fn is_attention(&self) -> bool {
        self.role() == ContextRole::Attends
    }

    /// Observes the largest score of each head from now on, in passes that record gradients; see
    /// [`take_largest_scores`](ContextSlot::take_largest_scores). Attention then multiplies queries and keys twice.
    pub fn observe_scores(&self) {
        self.0.largest.write().get_or_insert_default();
    }

    /// Takes the largest score of each head since the last call, `[H]`: the largest scaled product of a query and a
    /// key. It is over all pairs of tokens of a sequence, without masks, soft caps and programs of scores. `None`
    /// without a pass since then.
    pub fn take_largest_scores(&self) -> Option<Tensor<R>> {
        self.0.largest.write().as_mut().and_then(LargestScores::take)
    }

    fn observe(&self, q: &Var<R>, k: &Var<R>, scale: Option<f64>) -> Result<()> {
        if !q.requires_grad() || self.0.largest.read().is_none() {
            return Ok(());
        }
        if let Some(place) = self.place() {
            let why = "its largest scores are observed, and its sequences are cut over ranks: no rank has all keys";
            return Err(Error::state(place.of.to_string(), why));
        }
        let mut largest = self.0.largest.write();
        largest.as_mut().map_or(Ok(()), |largest| largest.add(&q.value()?, &k.value()?, scale))
    }

    /// The program of scores of this layer, if it was given one.
    pub fn scores(&self) -> Option<Arc<AttentionScores<R>>> {
        self.0.scores.read().clone()
    }

    /// Gives this layer a program of scores, or takes it away; see [`set_scores`](super::set_scores).
    pub fn set_scores(&self, scores: Option<Arc<AttentionScores<R>>>) {
        *self.0.scores.write() = scores;
    }

    fn place(&self) -> Option<Arc<ContextPlace<R>>> {
        self.0.place.read().clone()
    }

    /// The number of ranks that sequences are cut over; 1 if they are not cut.
    pub fn ranks(&self) -> usize {
        self.place().map_or(1, |place| place.group.size())
    }

    /// The positions in the whole sequence of `here` tokens, which are this rank's part of it.
    ///
    /// # Errors
    /// An error if other ranks would have other numbers of tokens.
    pub fn positions(&self, here: usize) -> Result<Vec<usize>> {
        Ok(self.part(here * self.ranks())?.ranges().iter().cloned().flatten().collect())
    }

    /// The part of a sequence of `tokens` tokens on this rank.
    ///
    /// # Errors
    /// An error if the tokens cannot be shared out among the ranks.
    #[track_caller]
    pub fn part(&self, tokens: usize) -> Result<SequencePart> {
        self.place().map_or_else(|| Ok(SequencePart::whole(tokens)), |place| place.group.part(tokens))
    }

    /// This rank's part of a value with all tokens of a sequence along `dim`, for example of targets in a custom loss.
    ///
    /// # Errors
    /// An error if there is no dimension `dim`, or its tokens cannot be shared out among the ranks.
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

    /// This rank's part of the tokens of whole sequences, `[B, T]`, as [`take`](ContextSlot::take) gives it. The first
    /// call compares the tokens of all ranks, and comes before parameters are read.
    ///
    /// # Errors
    /// Errors of [`take`](ContextSlot::take); and an error on every rank if ranks along context were given different
    /// tokens.
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

    /// Scales a sum over this rank's tokens for a loss of whole sequences, as [`loss`](ContextSlot::loss) computes it:
    /// multiplies it by the number of ranks. Every sum over tokens that is added to such a loss needs this scaling.
    /// Examples are a custom loss, a penalty on activations, and the [balance loss](crate::moe::Routing::balance_loss)
    /// of a mixture of experts. Terms that each rank computes in full, such as a penalty on parameters, must not be
    /// scaled.
    #[track_caller]
    pub fn of_whole(&self, sum: &Var<R>) -> Result<Var<R>> {
        match self.ranks() {
            1 => Ok(sum.clone()),
            ranks => sum.mul(ranks as f64),
        }
    }

    /// The part of the sequence that values between layers cover, given the number of tokens `here`; `None` if they
    /// cover all of it. `within` is the index and the number of parts if tensor parallelism cuts the sequence further
    /// ([`Placed::sequence_part`](super::Placed::sequence_part)).
    pub fn part_of_values(&self, here: usize, within: Option<(usize, usize)>) -> Result<Option<SequencePart>> {
        let (k, n) = within.unwrap_or((0, 1));
        let part = self.part(here * n * self.ranks())?.slice(k, n);
        Ok((!part.is_whole()).then_some(part))
    }

    /// Attention of queries `[B, H, T, D]` over keys and values `[B, G, T, D]`; where sequences are cut, over those of
    /// all ranks. A mask is of whole sequences too: it broadcasts to `[B, H, S, S]`.
    ///
    /// # Errors
    /// An error if the sequence is cut and options are not supported then, or a mask is not of whole sequences. Also if
    /// it is not cut, and segments do not cover all queries and keys.
    #[track_caller]
    pub fn attention(
        &self,
        [q, k, v]: [&Var<R>; 3],
        options: SdpaOptions<'_, Var<R>>,
        tokens: &AttendedTokens<'_, R>,
    ) -> Result<Var<R>> {
        if let Some(scores) = self.scores() {
            let (program, args) = scores.with_options([q, k], options, tokens)?;
            return self.attend_alone(&program, [q, k, v], &args.iter().collect::<Vec<_>>());
        }
        let segments = tokens.segments;
        self.observe(q, k, options.scale)?;
        let Some(place) = self.place() else {
            let Some(segments) = segments else { return q.attention_with(k, v, options) };
            let mask = segments_and(options.mask, [q, k], segments)?;
            return q.attention_with(k, v, SdpaOptions { mask: Some(&mask), ..options });
        };
        let SdpaOptions { mask, causal, window, scale, softcap, .. } = options;
        let is_plain = window == (None, None) || (causal && window.1.is_none());
        if mask.is_some() || !is_plain {
            let (program, args) = masked(&options, segments)?;
            return self.attend_alone(&program, [q, k, v], &args.iter().collect::<Vec<_>>());
        }
        let options = ContextAttention { causal, window, scale, softcap, segments, program: None };
        place.group.attention([q, k, v], options, &place.of)
    }

    /// Attention by a program of queries `[B, H, T, D]` over keys and values `[B, G, T, D]`; where sequences are cut,
    /// over those of all ranks. Positions are those in whole sequences, and arguments are of whole sequences: they
    /// broadcast to `[B, H, S, S]` for `S` tokens.
    ///
    /// # Errors
    /// The errors of [`AttentionProgram::attend`]; and an error if sequences are cut and the program has a table of
    /// blocks.
    #[track_caller]
    pub fn attend(&self, program: &AttentionProgram, qkv: [&Var<R>; 3], args: &[&Var<R>]) -> Result<Var<R>> {
        let Some(scores) = self.scores() else { return self.attend_alone(program, qkv, args) };
        let (program, args) = scores.after(program, args, &AttendedTokens::default(), false)?;
        self.attend_alone(&program, qkv, &args.iter().collect::<Vec<_>>())
    }

    /// Attention by a program alone, whatever the layer's program of scores.
    #[track_caller]
    fn attend_alone(&self, program: &AttentionProgram, qkv: [&Var<R>; 3], args: &[&Var<R>]) -> Result<Var<R>> {
        let [q, k, v] = qkv;
        self.observe(q, k, q.spec().shape.dims().last().map(|&width| program.scale_of(width)))?;
        let Some(place) = self.place() else { return program.attend(q, k, v, args) };
        let options = ContextAttention { program: Some((program, args)), ..Default::default() };
        place.group.attention(qkv, options, &place.of)
    }

    /// The loss of a language model from this rank's tokens. `targets`, `[B, T]`, are those of whole sequences; `of`
    /// computes the loss of this rank's part of them.
    ///
    /// Ranks along context count as data ranks do, so the loss stands for that of the whole sequences. A sum is
    /// multiplied by the number of ranks ([`of_whole`](ContextSlot::of_whole)); a mean is over all targets that count.
    /// So the mean of the ranks' losses is the loss of one rank, and the weight of a rank's loss is that of whole
    /// sequences. `Reduction::None` gives the losses of this rank's rows.
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
                let count = targets.ne(loss.cross_entropy.ignore_index as f64)?.to_dtype(rows.dtype())?.sum_all()?;
                self.of_whole(&rows.sum_all()?)?.div(&count)
            }
        }
    }
}

impl<R: Runtime> Module<R> for ContextSlot<R> {
    fn visit(&self, _: &str, visitor: &mut dyn Visitor<R>) {
        visitor.context(self);
        if let Some(scores) = self.scores() {
            scores.visit("scores", visitor);
        }
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
