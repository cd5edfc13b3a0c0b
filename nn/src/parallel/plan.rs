//! Which layers of a model are cut, and how: a table of names.

/// How a layer is cut over the ranks of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorStyle {
    /// Along its outputs, which stay cut (Hugging Face: `colwise`).
    Column,
    /// Along its inputs, which are cut already; outputs are summed over ranks (`rowwise`).
    Row,
    /// Along the rows of a vocabulary: an embedding, or the projection to logits.
    Vocabulary,
    /// By experts, which are shared out among the ranks along a mesh's expert axis; where they are not, replicated.
    Experts,
    /// Not at all.
    Replicated,
}

/// A plan of tensor parallelism: patterns of names, each with a style. Layers that no pattern names are replicated.
///
/// A pattern is the name of a layer, or of a parameter, in the model; `*` stands for any one part of it between dots. A model type has its
/// own, as [`Gpt::tensor_plan`](crate::Gpt::tensor_plan); for a model of one's own:
///
/// ```
/// use nn::parallel::TensorPlan;
/// let plan = TensorPlan::new().column("layers.*.up").row("layers.*.down").vocabulary("embedding");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "a plan is applied to a model"]
pub struct TensorPlan {
    entries: Vec<PlanEntry>,
    sequence: bool,
    /// In how many pieces layers exchange parts of the sequence; 0, which is one, where nobody asked.
    pieces: usize,
    /// Patterns of the modules that compute on parts of the sequence.
    regions: Vec<String>,
    /// Patterns whose lines were to be removed, and were not there.
    unknown: Vec<String>,
}

/// A line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PlanEntry {
    pub(super) pattern: String,
    pub(super) style: TensorStyle,
    pub(super) partial: Partiality,
    /// Whether the model may lack what the pattern names.
    pub(super) optional: bool,
}

/// When the gradient of what is replicated is a part of a sum over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Partiality {
    Never,
    /// Where the sequence is cut.
    OfSequence,
    Always,
}

impl TensorPlan {
    /// A plan that cuts nothing.
    pub fn new() -> Self {
        TensorPlan::default()
    }

    /// Cuts these linear layers along their outputs, which stay cut: what comes next works on a part of the channels or heads.
    pub fn column(self, pattern: impl Into<String>) -> Self {
        self.with(pattern, TensorStyle::Column, Partiality::Never)
    }

    /// Cuts these linear layers along their inputs, which a column-parallel layer has left cut.
    pub fn row(self, pattern: impl Into<String>) -> Self {
        self.with(pattern, TensorStyle::Row, Partiality::Never)
    }

    /// Cuts these embeddings, or projections to logits, along the vocabulary.
    pub fn vocabulary(self, pattern: impl Into<String>) -> Self {
        self.with(pattern, TensorStyle::Vocabulary, Partiality::Never)
    }

    /// Shares out the experts of these layers ([`Experts`](crate::moe::Experts)) among ranks that have different examples: tokens travel to
    /// the experts that they picked. The losses and limits of their [mixture](crate::moe::MixtureOfExperts) are then those of all ranks' tokens.
    pub fn experts(self, pattern: impl Into<String>) -> Self {
        self.with(pattern, TensorStyle::Experts, Partiality::Never)
    }

    /// Leaves these layers whole, as it leaves those that are not named.
    pub fn replicated(self, pattern: impl Into<String>) -> Self {
        self.with(pattern, TensorStyle::Replicated, Partiality::Never)
    }

    /// Leaves these layers whole, though each rank applies them to a part of the values: their gradients are summed over the ranks once a
    /// step. Norms of the heads of queries and keys are such layers.
    pub fn partial_gradient(self, pattern: impl Into<String>) -> Self {
        self.with(pattern, TensorStyle::Replicated, Partiality::Always)
    }

    /// Leaves these layers whole. With [`sequence_parallel`](TensorPlan::sequence_parallel) they compute on a part of the sequence, so their
    /// gradients are partial then: norms, and linear layers that are not cut. Projections of attention heads need all of the sequence.
    pub fn sequence(self, pattern: impl Into<String>) -> Self {
        self.with(pattern, TensorStyle::Replicated, Partiality::OfSequence)
    }

    /// The modules of the model between which values are cut along the sequence, with [`sequence_parallel`](TensorPlan::sequence_parallel);
    /// a pattern names a module with all that is in it. Within a region every parameter needs a line of the plan: those that are not cut are
    /// named by [`sequence`](TensorPlan::sequence).
    ///
    /// Only the author of a model can say this, as it is a promise about its `forward`: it cuts the sequence before the region
    /// ([`Placed::enter_sequence`]) and joins it after it ([`Placed::leave_sequence`], or a layer that is cut by `column` or `vocabulary`),
    /// and its dropout there is [`Dropout::forward_part`].
    ///
    /// [`Placed::enter_sequence`]: crate::parallel::Placed::enter_sequence
    /// [`Placed::leave_sequence`]: crate::parallel::Placed::leave_sequence
    /// [`Dropout::forward_part`]: crate::Dropout::forward_part
    pub fn sequence_region(mut self, pattern: impl Into<String>) -> Self {
        self.regions.push(pattern.into());
        self
    }

    /// This plan without its lines for a pattern: what it names stays whole. With [`sequence_parallel`](TensorPlan::sequence_parallel) what is
    /// in a region needs another line in their place.
    pub fn without(mut self, pattern: &str) -> Self {
        let before = self.entries.len();
        self.entries.retain(|entry| entry.pattern != pattern);
        if self.entries.len() == before {
            self.unknown.push(pattern.into());
        }
        self
    }

    /// Lets a model lack the layers of the last pattern: a head, where it is the embedding.
    pub fn if_there(mut self) -> Self {
        self.entries.iter_mut().next_back().into_iter().for_each(|last| last.optional = true);
        self
    }

    /// Whether the values between the layers, which all ranks have otherwise, are cut along the sequence (Korthikanti et al. 2022): norms,
    /// dropout and residuals are computed once, on a part by each rank. Sums become pairs of a reduce-scatter and an all-gather, which
    /// move as many bytes. The plan of a model that can do so says between which modules ([`sequence_region`](TensorPlan::sequence_region)).
    pub fn sequence_parallel(mut self, yes: bool) -> Self {
        self.sequence = yes;
        self
    }

    /// With [`sequence_parallel`](TensorPlan::sequence_parallel), has linear layers exchange parts of the sequence in so many pieces in forward: what a
    /// column-parallel layer gathers travels while its product with the piece before is computed, and so does what a row-parallel layer sums
    /// (asynchronous tensor parallelism). One, which is how it is unless this asks for more, exchanges all at once. As many bytes travel, and every
    /// element is computed as without: bits are the same where those of a runtime's product of some rows are those of the product of all.
    /// In backward a gather and a sum travel beside products too. It costs a copy of each output; layers that share what they gather, such as projections
    /// of queries and keys apart, gather it at once.
    #[doc(alias("async_tp"))]
    #[doc(alias("tp_comm_overlap"))]
    pub fn exchange_in_pieces(mut self, pieces: usize) -> Self {
        self.pieces = pieces;
        self
    }

    /// In how many pieces parts of the sequence are exchanged.
    pub(super) fn pieces(&self) -> usize {
        self.pieces.max(1)
    }

    /// Whether values between the layers are cut along the sequence.
    pub fn is_sequence_parallel(&self) -> bool {
        self.sequence
    }

    /// Whether experts are shared out, or know of other ranks' tokens.
    pub fn has_experts(&self) -> bool {
        self.entries.iter().any(|entry| entry.style == TensorStyle::Experts)
    }

    pub(super) fn entries(&self) -> &[PlanEntry] {
        &self.entries
    }

    pub(super) fn unknown(&self) -> &[String] {
        &self.unknown
    }

    pub(super) fn regions(&self) -> &[String] {
        &self.regions
    }

    fn with(mut self, pattern: impl Into<String>, style: TensorStyle, partial: Partiality) -> Self {
        self.entries.push(PlanEntry { pattern: pattern.into(), style, partial, optional: false });
        self
    }
}

impl PlanEntry {
    /// Whether the pattern names a parameter, or the layer that it is of.
    pub(super) fn names(&self, parameter: &str) -> bool {
        let layer = parameter.rsplit_once('.').map_or("", |(layer, _)| layer);
        matches(&self.pattern, parameter) || matches(&self.pattern, layer)
    }
}

/// Whether a pattern names a parameter, or a module that it is in.
pub(super) fn is_within(pattern: &str, parameter: &str) -> bool {
    let ends = parameter.match_indices('.').map(|(at, _)| at).chain([parameter.len()]);
    pattern.is_empty() || ends.into_iter().any(|end| matches(pattern, &parameter[..end]))
}

fn matches(pattern: &str, name: &str) -> bool {
    let (mut pattern, mut name) = (pattern.split('.'), name.split('.'));
    loop {
        match (pattern.next(), name.next()) {
            (None, None) => return true,
            (Some(p), Some(n)) if p == n || (p == "*" && !n.is_empty()) => {}
            _ => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_names_layers_and_their_parameters() {
        for (pattern, name, is) in [
            ("blocks.*.qkv", "blocks.3.qkv.weight", true),
            ("blocks.*.qkv", "blocks.3.qkv", true),
            ("blocks.*.qkv", "blocks.3.attn.qkv.weight", false),
            ("blocks.*.qkv", "blocks.qkv.weight", false),
            ("blocks.*.qkv.weight", "blocks.3.qkv.weight", true),
            ("blocks.*.qkv.weight", "blocks.3.qkv.bias", false),
            ("*", "wte.weight", true),
            ("wte", "wte2.weight", false),
            ("", "weight", true),
        ] {
            let entry = PlanEntry {
                pattern: pattern.into(),
                style: TensorStyle::Row,
                partial: Partiality::Never,
                optional: false,
            };
            assert_eq!(entry.names(name), is, "{pattern} {name}");
        }
    }

    #[test]
    fn a_region_is_all_that_is_in_a_module() {
        for (pattern, name, is) in [
            ("blocks.*", "blocks.3.qkv.weight", true),
            ("blocks.*", "blocks.weight", true),
            ("blocks.*", "blocks2.3.weight", false),
            ("lnf", "lnf.weight", true),
            ("lnf.weight", "lnf.weight", true),
            ("lnf.weight", "lnf.weight.scale", true),
            ("", "wte.weight", true),
            ("*.ln", "blocks.ln", true),
            ("*.ln", "ln.weight", false),
        ] {
            assert_eq!(is_within(pattern, name), is, "{pattern} {name}");
        }
    }
}
