//! BERT and ViT against transformers: logits, gradients, files.

use autograd::Var;
use models::{Bert, BertConfig, BertInputs, Change, Pretrained, Vit, VitConfig};
use nn::{Forward, ModuleExt, loss::cross_entropy};
use numcore::{
    DType, Tensor,
    ops::{PointwiseOps, ViewOps},
};

use crate::common::*;

const BERTS: [&str; 9] = [
    "bert_mlm",
    "bert_classifier",
    "bert_tokens",
    "roberta_mlm",
    "roberta_classifier",
    "roberta_tokens",
    "distilbert_mlm",
    "distilbert_classifier",
    "distilbert_tokens",
];

fn bert(name: &str) -> Bert<runtime_cpu::Cpu> {
    Bert::from_pretrained(reference(name), &init()).unwrap()
}

fn vit() -> Vit<runtime_cpu::Cpu> {
    Vit::from_pretrained(reference("vit"), &init()).unwrap()
}

#[test]
fn bert_is_that_of_transformers_with_every_head() {
    for name in BERTS {
        let (model, due) = (bert(name), Reference::read(name));
        let types = name.starts_with("bert").then(|| due.var("types"));
        let (ids, mask) = (due.var("ids"), due.var("mask"));
        let inputs = BertInputs { mask: Some(&mask), token_types: types.as_ref() };
        let logits = model.forward_with(&ids, &inputs).unwrap();
        close(name, &logits.value().unwrap(), &due.tensor("logits"), 2e-5);
        let loss = cross_entropy(&logits, &due.var("target")).unwrap();
        check_grads(&model, &loss, &due, |theirs| (model.table().ours(theirs).unwrap().name, false));
    }
}

#[test]
fn a_mask_of_bool_and_no_mask() {
    let (model, due) = (bert("bert_tokens"), Reference::read("bert_tokens"));
    let (ids, mask, types) = (due.var("ids"), due.var("mask"), due.var("types"));
    let mask = Var::new(mask.value().unwrap().to_dtype(DType::Bool).unwrap());
    let logits = model.forward_with(&ids, &BertInputs { mask: Some(&mask), token_types: Some(&types) }).unwrap();
    close("bool", &logits.value().unwrap(), &due.tensor("logits"), 2e-5);
    // The first row has no padding; without types all are the first.
    let first = |x: &Var<_>| x.narrow(0, 0, 1).unwrap();
    let zeros = Var::new(Tensor::zeros(&cpu(), [1, 13], DType::I64).unwrap());
    let with = model.forward_with(&first(&ids), &BertInputs { mask: None, token_types: Some(&zeros) }).unwrap();
    let without = model.forward(&first(&ids)).unwrap();
    close("types", &without.value().unwrap(), &with.value().unwrap(), 1e-6);
}

#[test]
fn vit_is_that_of_transformers() {
    let (model, due) = (vit(), Reference::read("vit"));
    let logits = model.forward(&due.var("pixels")).unwrap();
    close("vit", &logits.value().unwrap(), &due.tensor("logits"), 2e-5);
    let loss = cross_entropy(&logits, &due.var("target")).unwrap();
    check_grads(&model, &loss, &due, |theirs| {
        let ours = model.table().ours(theirs).unwrap();
        (ours.name, ours.change == Change::Transpose)
    });
}

#[test]
fn saving_what_was_loaded_gives_the_same_bits() {
    let scratch = Scratch::new();
    for name in BERTS {
        let model = bert(name);
        model.save_pretrained(&scratch.0).unwrap();
        same_tensors(&weight_files(&reference(name)), &weight_files(&scratch.0));
        let mut again = Bert::from_pretrained(&scratch.0, &init()).unwrap().config().clone();
        again.fields = model.config().fields.clone();
        assert_eq!(again, *model.config());
    }
    vit().save_pretrained(&scratch.0).unwrap();
    same_tensors(&weight_files(&reference("vit")), &weight_files(&scratch.0));
    Vit::from_pretrained(&scratch.0, &init()).unwrap();
}

/// A classifier on what was pretrained without one: the head is missing and drawn.
#[test]
fn a_new_head_on_a_pretrained_model() {
    let folder = Scratch::copy_of("bert_mlm").with_config(|fields| {
        fields.insert("architectures".into(), serde_json::json!(["BertForSequenceClassification"]));
    });
    let (model, report) = Bert::from_pretrained_partly(&folder.0, &init()).unwrap();
    let missing: Vec<&str> = report.missing.keys().map(String::as_str).collect();
    assert_eq!(missing, ["head.classifier.bias", "head.classifier.weight", "pooler.bias", "pooler.weight"]);
    assert_eq!(report.unexpected.len(), 5);
    let ids = Reference::read("bert_mlm").var("ids");
    assert_eq!(model.forward(&ids).unwrap().dims(), [2, 3]);
    let error = Bert::from_pretrained(&folder.0, &init()).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("pooler.weight (in files bert.pooler.dense.weight)"), "{error}");
}

/// The hub's BERT has what it was pretrained with besides: a pooler and the prediction of the next sentence.
#[test]
fn heads_that_are_not_used_are_left_out() {
    let folder = Scratch::copy_of("bert_mlm");
    let path = folder.0.join("model.safetensors");
    let mut tensors = numcore::safetensors::load(&path, &cpu()).unwrap();
    let zeros = Tensor::zeros(&cpu(), [12, 12], DType::F32).unwrap();
    let more = ["bert.pooler.dense.weight", "cls.seq_relationship.weight"];
    tensors.extend(more.map(|name| (name.to_string(), zeros.clone())));
    let embedding = tensors.iter().find(|(name, _)| name.ends_with("word_embeddings.weight")).unwrap().1.clone();
    tensors.push(("cls.predictions.decoder.weight".into(), embedding));
    numcore::safetensors::save(&path, &tensors, &Default::default()).unwrap();
    let (_, report) = Bert::from_pretrained_partly(&folder.0, &init()).unwrap();
    report.strict().unwrap();
    assert_eq!(report.ignored.len(), 3);
    // A head of its own is none that may be left out.
    tensors.last_mut().unwrap().1 = zeros;
    numcore::safetensors::save(&path, &tensors, &Default::default()).unwrap();
    let error = Bert::from_pretrained(&folder.0, &init()).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("head.decoder.weight is no copy of bert.embeddings.word_embeddings.weight"), "{error}");
}

/// Files of fine-tuned RoBERTas may have the pooler of the pretrained model; the classifier has its own.
#[test]
fn a_pooler_beside_a_classifier_is_left_out() {
    let folder = Scratch::copy_of("roberta_classifier");
    let path = folder.0.join("model.safetensors");
    let mut tensors = numcore::safetensors::load(&path, &cpu()).unwrap();
    tensors.push(("roberta.pooler.dense.bias".into(), Tensor::zeros(&cpu(), [12], DType::F32).unwrap()));
    numcore::safetensors::save(&path, &tensors, &Default::default()).unwrap();
    let (_, report) = Bert::from_pretrained_partly(&folder.0, &init()).unwrap();
    report.strict().unwrap();
    assert_eq!(report.ignored, ["roberta.pooler.dense.bias"]);
}

/// The fields of `bert-base-uncased` and `bert-base-multilingual-cased`.
#[test]
fn configurations_of_the_first_bert_are_read() {
    let folder = Scratch::copy_of("bert_mlm").with_config(|fields| {
        let more = serde_json::json!({
            "gradient_checkpointing": false, "position_embedding_type": "absolute", "pruned_heads": {},
            "directionality": "bidi", "pooler_fc_size": 768, "pooler_num_attention_heads": 12,
            "pooler_num_fc_layers": 3, "pooler_size_per_head": 128, "pooler_type": "first_token_transform"
        });
        fields.extend(more.as_object().cloned().unwrap());
    });
    Bert::from_pretrained(&folder.0, &init()).unwrap();
    let pruned = folder.with_config(|fields| drop(fields.insert("pruned_heads".into(), serde_json::json!({"0": [1]}))));
    let error = Bert::from_pretrained(&pruned.0, &init()).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("`pruned_heads`"), "{error}");
}

#[test]
fn files_of_old_versions_say_gamma_and_beta() {
    let folder = Scratch::copy_of("bert_mlm");
    let path = folder.0.join("model.safetensors");
    let mut tensors = numcore::safetensors::load(&path, &cpu()).unwrap();
    for (name, _) in &mut tensors {
        *name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta");
    }
    numcore::safetensors::save(&path, &tensors, &Default::default()).unwrap();
    let model = Bert::from_pretrained(&folder.0, &init()).unwrap();
    for ((name, a), (_, b)) in model.named_parameters().iter().zip(bert("bert_mlm").named_parameters()) {
        close(name, &a.value().unwrap(), &b.value().unwrap(), 0.0);
    }
}

/// What is written is what is computed, not what the file once said.
#[test]
fn configurations_say_what_is_computed() {
    let mut config = bert("bert_classifier").config().clone();
    (config.block.activation, config.padding, config.labels) = (nn::Activation::Relu, Some(3), 5);
    config.fields.insert("num_labels".into(), 3.into());
    let (model, scratch) = (Bert::new(&init(), config.clone()).unwrap(), Scratch::new());
    model.save_pretrained(&scratch.0).unwrap();
    let again = Bert::from_pretrained(&scratch.0, &init()).unwrap().config().clone();
    assert_eq!((again.block, again.padding, again.labels), (config.block, config.padding, config.labels));
    let padding = |change: fn(&mut serde_json::Map<String, serde_json::Value>)| {
        let folder = Scratch::copy_of("bert_mlm").with_config(change);
        Bert::from_pretrained(&folder.0, &init()).unwrap().config().padding
    };
    assert_eq!(padding(|fields| drop(fields.remove("pad_token_id"))), Some(0), "as in transformers");
    assert_eq!(padding(|fields| drop(fields.insert("pad_token_id".into(), serde_json::Value::Null))), None);
    let both = Scratch::copy_of("bert_mlm").with_config(|fields| drop(fields.insert("num_labels".into(), 7.into())));
    let error = Bert::from_pretrained(&both.0, &init()).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("`num_labels` is 7, and `id2label` names 3"), "{error}");
}

#[test]
fn what_is_not_an_encoder_here_is_an_error() {
    let error = |folder: &Scratch| Bert::from_pretrained(&folder.0, &init()).map(|_| ()).unwrap_err().to_string();
    let with = |field: &str, value: serde_json::Value| {
        Scratch::copy_of("bert_mlm").with_config(|fields| drop(fields.insert(field.into(), value)))
    };
    assert!(error(&Scratch::copy_of("llama")).contains("`llama`; encoders of text are: bert, roberta"));
    for (name, field, value, due) in [
        ("roberta_mlm", "pad_token_id", serde_json::Value::Null, "`pad_token_id` is null"),
        ("roberta_mlm", "architectures", serde_json::json!(["BertForMaskedLM"]), "RobertaForMaskedLM"),
        ("distilbert_mlm", "sinusoidal_pos_embds", true.into(), "`sinusoidal_pos_embds` is true"),
        ("distilbert_mlm", "type_vocab_size", 2.into(), "`type_vocab_size`"),
        ("distilbert_mlm", "activation", "xielu".into(), "`xielu`"),
    ] {
        let folder = Scratch::copy_of(name).with_config(|fields| drop(fields.insert(field.into(), value)));
        assert!(error(&folder).contains(due), "{}", error(&folder));
    }
    let due = Reference::read("distilbert_tokens");
    let inputs = BertInputs { mask: None, token_types: Some(&due.var("mask")) };
    let segments = bert("distilbert_tokens").forward_with(&due.var("ids"), &inputs).map(drop).unwrap_err().to_string();
    assert!(segments.contains("no segments"), "{segments}");
    // Two of RoBERTa's 32 positions are of padding and before it.
    let long = Var::new(Tensor::zeros(&cpu(), [1, 30], DType::I64).unwrap());
    let long = bert("roberta_tokens").forward(&long).map(drop).unwrap_err().to_string();
    assert!(long.contains("30 tokens are more than the context of 29"), "{long}");
    let xlm = Scratch::copy_of("roberta_mlm").with_config(|fields| {
        fields.insert("model_type".into(), "xlm-roberta".into());
        fields.insert("architectures".into(), serde_json::json!(["XLMRobertaForMaskedLM"]));
    });
    let due = Reference::read("roberta_mlm");
    let inputs = BertInputs { mask: Some(&due.var("mask")), token_types: None };
    let logits = Bert::from_pretrained(&xlm.0, &init()).unwrap().forward_with(&due.var("ids"), &inputs).unwrap();
    close("xlm", &logits.value().unwrap(), &due.tensor("logits"), 2e-5);
    assert!(error(&with("position_embedding_type", "relative_key".into())).contains("relative_key"));
    assert!(error(&with("is_decoder", true.into())).contains("is_decoder"));
    assert!(error(&with("architectures", serde_json::json!(["BertForQuestionAnswering"]))).contains("Question"));
    let large =
        Scratch::copy_of("vit").with_config(|fields| drop(fields.insert("image_size".into(), (1u64 << 40).into())));
    let error = Vit::from_pretrained(&large.0, &init()).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("`image_size`"), "{error}");
    let image = Var::new(Tensor::zeros(&cpu(), [1, 3, 8, 12], DType::F32).unwrap());
    assert!(vit().forward(&image).map(|_| ()).unwrap_err().to_string().contains("[B, 3, 12, 12]"));
}

#[test]
fn what_a_file_cannot_say_is_an_error() {
    let vit = Vit::from_pretrained(reference("vit"), &init()).unwrap().config().clone();
    let bert = Bert::from_pretrained(reference("bert_classifier"), &init()).unwrap().config().clone();
    // Dropout is of training alone; norms are where the family has them.
    let mut block = bert.block;
    block.dropout = 0.5;
    assert!(Bert::new(&init(), BertConfig { block, ..bert.clone() }).is_ok());
    (block.dropout, block.qkv_bias) = (0.0, false);
    let error = Bert::new(&init(), BertConfig { block, ..bert }).unwrap_err().to_string();
    assert!(error.contains("cannot be so") && error.contains("qkv_bias"), "{error}");
    let mut block = vit.block;
    block.qkv_bias = false;
    assert!(Vit::new(&init(), VitConfig { block, ..vit.clone() }).is_ok());
    block.pre_norm = false;
    let error = Vit::new(&init(), VitConfig { block, ..vit }).unwrap_err().to_string();
    assert!(error.contains("cannot be so") && error.contains("pre_norm"), "{error}");
}
