//! The conversion tables of models of images.

use super::{ConversionRule as Rule, ConversionTable};

/// ViT with its classifier.
pub(crate) const VIT: ConversionTable = ConversionTable {
    rules: &[
        Rule::keep("vit.embeddings.cls_token", "cls_token"),
        Rule::keep("vit.embeddings.position_embeddings", "positions"),
        Rule::keep("vit.embeddings.patch_embeddings.projection", "patches"),
        Rule::keep("vit.encoder.layer.{}.layernorm_before", "layers.{}.norm1"),
        Rule::keep("vit.encoder.layer.{}.attention.attention.query", "layers.{}.query"),
        Rule::keep("vit.encoder.layer.{}.attention.attention.key", "layers.{}.key"),
        Rule::keep("vit.encoder.layer.{}.attention.attention.value", "layers.{}.value"),
        Rule::keep("vit.encoder.layer.{}.attention.output.dense", "layers.{}.output"),
        Rule::keep("vit.encoder.layer.{}.layernorm_after", "layers.{}.norm2"),
        Rule::keep("vit.encoder.layer.{}.intermediate.dense", "layers.{}.fc1"),
        Rule::keep("vit.encoder.layer.{}.output.dense", "layers.{}.fc2"),
        Rule::keep("vit.layernorm", "norm"),
        Rule::keep("classifier", "classifier"),
    ],
    stacks: &[],
    prefix: "vit.",
    old_leaves: &[],
    ignored: &["vit.pooler.dense.weight", "vit.pooler.dense.bias"],
    modules: &[
        Rule::keep("vit.layers.{}.attention.q_proj", "vit.encoder.layer.{}.attention.attention.query"),
        Rule::keep("vit.layers.{}.attention.k_proj", "vit.encoder.layer.{}.attention.attention.key"),
        Rule::keep("vit.layers.{}.attention.v_proj", "vit.encoder.layer.{}.attention.attention.value"),
        Rule::keep("vit.layers.{}.attention.o_proj", "vit.encoder.layer.{}.attention.output.dense"),
        Rule::keep("vit.layers.{}.mlp.fc1", "vit.encoder.layer.{}.intermediate.dense"),
        Rule::keep("vit.layers.{}.mlp.fc2", "vit.encoder.layer.{}.output.dense"),
        Rule::keep("vit.layers.{}", "vit.encoder.layer.{}"),
    ],
};

/// ResNet with its classifier.
pub(crate) const RESNET: ConversionTable = ConversionTable {
    rules: &[
        Rule::keep("resnet.embedder.embedder.convolution", "stem.conv"),
        Rule::keep("resnet.embedder.embedder.normalization", "stem.norm"),
        Rule::keep("resnet.encoder.stages.{}.layers.{}.shortcut.convolution", "stages.{}.layers.{}.shortcut.conv"),
        Rule::keep("resnet.encoder.stages.{}.layers.{}.shortcut.normalization", "stages.{}.layers.{}.shortcut.norm"),
        Rule::keep("resnet.encoder.stages.{}.layers.{}.layer.{}.convolution", "stages.{}.layers.{}.convs.{}.conv"),
        Rule::keep("resnet.encoder.stages.{}.layers.{}.layer.{}.normalization", "stages.{}.layers.{}.convs.{}.norm"),
        Rule::keep("classifier.1", "classifier"),
    ],
    stacks: &[],
    prefix: "resnet.",
    old_leaves: &[],
    ignored: &[],
    modules: &[],
};

/// ConvNeXt with its classifier.
pub(crate) const CONVNEXT: ConversionTable = ConversionTable {
    rules: &[
        Rule::keep("convnext.embeddings.patch_embeddings", "patches"),
        Rule::keep("convnext.embeddings.layernorm", "patch_norm"),
        Rule::keep("convnext.encoder.stages.{}.downsampling_layer.0", "stages.{}.halving_norm"),
        Rule::keep("convnext.encoder.stages.{}.downsampling_layer.1", "stages.{}.halving"),
        Rule::keep("convnext.encoder.stages.{}.layers.{}.dwconv", "stages.{}.layers.{}.conv"),
        Rule::keep("convnext.encoder.stages.{}.layers.{}.layernorm", "stages.{}.layers.{}.norm"),
        Rule::keep("convnext.encoder.stages.{}.layers.{}.pwconv1", "stages.{}.layers.{}.linear1"),
        Rule::keep("convnext.encoder.stages.{}.layers.{}.pwconv2", "stages.{}.layers.{}.linear2"),
        Rule::keep("convnext.encoder.stages.{}.layers.{}.layer_scale_parameter", "stages.{}.layers.{}.scale"),
        Rule::keep("convnext.layernorm", "norm"),
        Rule::keep("classifier", "classifier"),
    ],
    prefix: "convnext.",
    ..RESNET
};

/// CLIP.
pub(crate) const CLIP: ConversionTable = ConversionTable {
    rules: &[
        Rule::keep("logit_scale", "logit_scale"),
        Rule::keep("text_projection", "text_projection"),
        Rule::keep("visual_projection", "image_projection"),
        Rule::keep("text_model.embeddings.token_embedding", "text.embed_tokens"),
        Rule::keep("text_model.embeddings.position_embedding", "text.embed_positions"),
        Rule::keep("vision_model.embeddings.class_embedding", "image.cls_token"),
        Rule::keep("vision_model.embeddings.patch_embedding", "image.patches"),
        Rule::keep("vision_model.embeddings.position_embedding", "image.embed_positions"),
        Rule::keep("vision_model.pre_layrnorm", "image.first_norm"),
        Rule::keep("text_model.encoder.layers.{}.layer_norm1", "text.layers.{}.attention_norm"),
        Rule::keep("text_model.encoder.layers.{}.self_attn.q_proj", "text.layers.{}.attention.q_proj"),
        Rule::keep("text_model.encoder.layers.{}.self_attn.k_proj", "text.layers.{}.attention.k_proj"),
        Rule::keep("text_model.encoder.layers.{}.self_attn.v_proj", "text.layers.{}.attention.v_proj"),
        Rule::keep("text_model.encoder.layers.{}.self_attn.out_proj", "text.layers.{}.attention.o_proj"),
        Rule::keep("text_model.encoder.layers.{}.layer_norm2", "text.layers.{}.mlp_norm"),
        Rule::keep("text_model.encoder.layers.{}.mlp.fc1", "text.layers.{}.mlp.up_proj"),
        Rule::keep("text_model.encoder.layers.{}.mlp.fc2", "text.layers.{}.mlp.down_proj"),
        Rule::keep("text_model.final_layer_norm", "text.norm"),
        Rule::keep("vision_model.encoder.layers.{}.layer_norm1", "image.layers.{}.attention_norm"),
        Rule::keep("vision_model.encoder.layers.{}.self_attn.q_proj", "image.layers.{}.attention.q_proj"),
        Rule::keep("vision_model.encoder.layers.{}.self_attn.k_proj", "image.layers.{}.attention.k_proj"),
        Rule::keep("vision_model.encoder.layers.{}.self_attn.v_proj", "image.layers.{}.attention.v_proj"),
        Rule::keep("vision_model.encoder.layers.{}.self_attn.out_proj", "image.layers.{}.attention.o_proj"),
        Rule::keep("vision_model.encoder.layers.{}.layer_norm2", "image.layers.{}.mlp_norm"),
        Rule::keep("vision_model.encoder.layers.{}.mlp.fc1", "image.layers.{}.mlp.up_proj"),
        Rule::keep("vision_model.encoder.layers.{}.mlp.fc2", "image.layers.{}.mlp.down_proj"),
        Rule::keep("vision_model.post_layernorm", "image.norm"),
    ],
    prefix: "",
    // Positions 0, 1, ….
    ignored: &["text_model.embeddings.position_ids", "vision_model.embeddings.position_ids"],
    ..RESNET
};
