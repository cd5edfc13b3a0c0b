//! The plan of tensor parallelism: a table of the names of layers and the style of each cut.

/// The way that a layer is cut over the ranks of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorStyle {
    /// Cut along the outputs, which stay cut (Hugging Face: `colwise`).
    Column,
    /// Cut along the inputs, which are cut already; outputs are summed over ranks (`rowwise`).
    Row,
    /// Cut along the outputs. Inputs, which are cut already, are gathered before the product, and outputs after it, so
    /// sums are those of one rank.
    Gathered,
    /// Cut along the rows of a vocabulary: an embedding, or the projection to logits.
    Vocabulary,
    /// Sharded by experts along a mesh's expert axis; replicated if there is none.
    Experts,
    /// Replicated on all ranks.
    Replicated,
}

/// A plan of tensor parallelism: patterns of names, each with a style. Layers without a matching pattern are
/// replicated.
///
/// A pattern is the name of a layer, or of a parameter, in the model; `*` stands for one part of it between dots. A
/// model type has its own plan, such as [`Gpt::tensor_plan`](crate::Gpt::tensor_plan). A plan for a custom model:
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
    /// True if every sum of a forward pass is that of one rank.
    whole_sums: bool,
    /// The number of pieces in which layers exchange parts of the sequence; 0, the default, counts as 1.
    pieces: usize,
    /// Patterns of the modules that compute on parts of the sequence.
    regions: Vec<String>,
    /// Patterns passed to `without` that had no entry.
    unknown: Vec<String>,
}

/// One entry of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PlanEntry {
    pub(super) pattern: String,
    pub(super) style: TensorStyle,
    pub(super) partial: Partiality,
    /// True if the model may lack the layers that the pattern names.
    pub(super) optional: bool,
}

/// The cases in which the gradient of a replicated parameter is a part of a sum over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Partiality {
    Never,
    /// Partial if the sequence is cut.
    OfSequence,
    Always,
}

impl TensorPlan {
    /// Creates a plan that cuts nothing.
    pub fn new() -> Self {
        TensorPlan::default()
    }

    /// Cuts these linear layers along their outputs, which stay cut: the next layer works on a part of the channels or
    /// heads.
    pub fn column(self, pattern: impl Into<String>) -> Self {
        self.with(pattern, TensorStyle::Column, Partiality::Never)
    }

    /// Cuts these linear layers along their inputs, which a column-parallel layer has left cut.
    pub fn row(self, pattern: impl Into<String>) -> Self {
        self.with(pattern, TensorStyle::Row, Partiality::Never)
    }

    /// Cuts these embeddings, or projections to logits, along the vocabulary. Of a size that ranks do not divide, the
    /// last ranks have fewer rows, or none.
    pub fn vocabulary(self, pattern: impl Into<String>) -> Self {
        self.with(pattern, TensorStyle::Vocabulary, Partiality::Never)
    }

    /// Shards the experts of these layers ([`Experts`](crate::moe::Experts)) over ranks with different examples; tokens
    /// travel to the experts that they picked. The losses and limits of their [mixture](crate::moe::MixtureOfExperts)
    /// then cover the tokens of all ranks.
    pub fn experts(self, pattern: impl Into<String>) -> Self {
        self.with(pattern, TensorStyle::Experts, Partiality::Never)
    }

    /// Leaves these layers unsharded, like layers without a pattern.
    pub fn replicated(self, pattern: impl Into<String>) -> Self {
        self.with(pattern, TensorStyle::Replicated, Partiality::Never)
    }

    /// Leaves these layers unsharded, though each rank applies them to a part of the values. Their gradients are summed
    /// over the ranks once per step. Norms of query and key heads are such layers.
    pub fn partial_gradient(self, pattern: impl Into<String>) -> Self {
        self.with(pattern, TensorStyle::Replicated, Partiality::Always)
    }

    /// Leaves these layers unsharded. With [`sequence_parallel`](TensorPlan::sequence_parallel) they compute on a part
    /// of the sequence, so their gradients are then partial: norms, and linear layers that are not cut. Projections of
    /// attention heads need the whole sequence, so naming one is then an error.
    pub fn sequence(self, pattern: impl Into<String>) -> Self {
        self.with(pattern, TensorStyle::Replicated, Partiality::OfSequence)
    }

    /// Names modules of the model between which values are cut along the sequence, with
    /// [`sequence_parallel`](TensorPlan::sequence_parallel). A pattern covers a module and everything in it. Within a
    /// region every parameter needs an entry of the plan; parameters that are not cut are named by
    /// [`sequence`](TensorPlan::sequence).
    ///
    /// The author of a model adds this, as it is a promise about `forward`. The model cuts the sequence before the
    /// region ([`Placed::enter_sequence`]). It joins it after the region ([`Placed::leave_sequence`], or a layer cut by
    /// `column` or `vocabulary`). Dropout in the region is [`Dropout::forward_part`].
    ///
    /// [`Placed::enter_sequence`]: crate::parallel::Placed::enter_sequence
    /// [`Placed::leave_sequence`]: crate::parallel::Placed::leave_sequence
    /// [`Dropout::forward_part`]: crate::Dropout::forward_part
    pub fn sequence_region(mut self, pattern: impl Into<String>) -> Self {
        self.regions.push(pattern.into());
        self
    }

    /// Removes the entries of a pattern; the layers it names stay unsharded. With
    /// [`sequence_parallel`](TensorPlan::sequence_parallel), layers in a region need another entry instead.
    pub fn without(mut self, pattern: &str) -> Self {
        let before = self.entries.len();
        self.entries.retain(|entry| entry.pattern != pattern);
        if self.entries.len() == before {
            self.unknown.push(pattern.into());
        }
        self
    }

    /// Allows a model to lack the layers of the last pattern, such as a head that is tied to the embedding.
    pub fn optional(mut self) -> Self {
        self.entries.iter_mut().next_back().into_iter().for_each(|last| last.optional = true);
        self
    }

    /// Sets whether values between layers are cut along the sequence (Korthikanti et al. 2022); otherwise all ranks
    /// have them. Norms, dropout and residuals are then computed once, each rank on its part. Each sum becomes a pair
    /// of a reduce-scatter and an all-gather, which moves as many bytes. The plan of a model that supports it names the
    /// modules concerned ([`sequence_region`](TensorPlan::sequence_region)).
    pub fn sequence_parallel(mut self, yes: bool) -> Self {
        self.sequence = yes;
        self
    }

    /// Makes every sum of a forward pass that of one rank, so outputs have its bits for any number of ranks. That holds
    /// where a product's bits do not depend on its number of columns, as on the CPU. Layers that
    /// [`row`](TensorPlan::row) names are [`Gathered`](TensorStyle::Gathered), so ranks must divide their outputs, and
    /// losses gather logits.
    ///
    /// Weights take no more memory. Ranks exchange inputs and outputs of such a layer instead of outputs alone, and all
    /// logits. Gradients are still sums over ranks. It is for reinforcement, where trainer and sampler are to agree to
    /// the bit.
    #[doc(alias("batch_invariant"))]
    pub fn whole_sums(mut self) -> Self {
        self.whole_sums = true;
        self
    }

    /// The style in which the layers of an entry are cut.
    pub(super) fn style_of(&self, entry: &PlanEntry) -> TensorStyle {
        if self.whole_sums && entry.style == TensorStyle::Row { TensorStyle::Gathered } else { entry.style }
    }

    /// Sets the number of pieces in which linear layers exchange parts of the sequence in forward, with
    /// [`sequence_parallel`](TensorPlan::sequence_parallel); 1 by default. The gather of a column-parallel layer
    /// travels beside the product with the piece before. So does the sum of a row-parallel layer (asynchronous tensor
    /// parallelism).
    ///
    /// Bytes sent are as many as with one piece, and every element is computed alike. Bits are the same if the
    /// runtime's product of some rows equals those rows of the product of all. In backward a gather and a sum travel
    /// beside products too. The cost is a copy of each output. Layers that share a gather, such as separate projections
    /// of queries and keys, gather it at once.
    #[doc(alias("async_tp"))]
    #[doc(alias("tp_comm_overlap"))]
    pub fn exchange_in_pieces(mut self, pieces: usize) -> Self {
        self.pieces = pieces;
        self
    }

    /// The number of pieces in which parts of the sequence are exchanged.
    pub(super) fn pieces(&self) -> usize {
        self.pieces.max(1)
    }

    /// Tells whether values between the layers are cut along the sequence.
    pub(crate) fn is_sequence_parallel(&self) -> bool {
        self.sequence
    }

    /// Tells whether every sum of a forward pass is that of one rank.
    pub(super) fn has_whole_sums(&self) -> bool {
        self.whole_sums
    }

    /// Tells whether the plan names experts, which are then sharded or count the tokens of other ranks.
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
    /// Tells whether the pattern names a parameter, or the layer of the parameter.
    pub(super) fn names(&self, parameter: &str) -> bool {
        let layer = parameter.rsplit_once('.').map_or("", |(layer, _)| layer);
        matches(&self.pattern, parameter) || matches(&self.pattern, layer)
    }
}

/// Tells whether a pattern names a parameter, or a module that contains it.
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
