//! The tensor parallelism of decoders.

use nn::parallel::TensorPlan;
use numcore::Runtime;

use super::Decoder;

impl<R: Runtime> Decoder<R> {
    /// The plan of tensor parallelism for every family, layer by layer as Hugging Face has it. Projections into
    /// attention and into the linear layers are `colwise`, those back `rowwise`. Norms of heads are replicated with
    /// their gradients summed, embedding and head cut along the vocabulary, and experts along the expert axis. Heads
    /// must divide evenly among ranks; those of keys and values may be fewer than ranks.
    ///
    /// With [`sequence_parallel`](TensorPlan::sequence_parallel), layers and last norm compute on parts of the
    /// sequence; mixtures need all of it. A cache needs a plan without that.
    ///
    /// A vocabulary may have any size. Models built [lazily](nn::Init::lazily) are read into each rank's pieces, a
    /// parameter at a time.
    pub fn tensor_plan() -> TensorPlan {
        let attention = ["q_proj", "k_proj", "v_proj", "qkv_proj"].iter();
        let attention = attention.fold(TensorPlan::new(), |plan, projection| {
            plan.column(format!("layers.*.self_attn.{projection}")).optional()
        });
        attention
            .row("layers.*.self_attn.o_proj")
            .column("layers.*.self_attn.q_b_proj")
            .optional()
            .column("layers.*.self_attn.kv_b_proj")
            .optional()
            .column("layers.*.self_attn.sinks")
            .optional()
            .column("layers.*.self_attn.scores")
            .optional()
            .partial_gradient("layers.*.self_attn.q_norm")
            .optional()
            .partial_gradient("layers.*.self_attn.k_norm")
            .optional()
            .column("layers.*.mlp.gate_proj")
            .optional()
            .column("layers.*.mlp.up_proj")
            .optional()
            .column("layers.*.mlp.gate_up_proj")
            .optional()
            .row("layers.*.mlp.down_proj")
            .optional()
            .column("layers.*.mlp.shared_experts.gate_proj")
            .optional()
            .column("layers.*.mlp.shared_experts.up_proj")
            .optional()
            .row("layers.*.mlp.shared_experts.down_proj")
            .optional()
            .experts("layers.*.mlp.experts")
            .optional()
            .vocabulary("embed_tokens")
            .vocabulary("lm_head")
            .optional()
            .sequence("layers.*.input_norm")
            .optional()
            .sequence("layers.*.post_attention_norm")
            .optional()
            .sequence("layers.*.mlp_norm")
            .optional()
            .sequence("layers.*.post_mlp_norm")
            .optional()
            .sequence("layers.*.enorm")
            .optional()
            .sequence("layers.*.hnorm")
            .optional()
            .sequence("layers.*.eh_proj")
            .optional()
            .sequence("layers.*.head_norm")
            .optional()
            .sequence("layers.*.self_attn.q_a_proj")
            .optional()
            .sequence("layers.*.self_attn.q_a_norm")
            .optional()
            .sequence("layers.*.self_attn.kv_a_proj")
            .optional()
            .sequence("layers.*.self_attn.kv_a_norm")
            .optional()
            .sequence("norm")
            .sequence_region("layers.*")
            .sequence_region("norm")
    }
}
