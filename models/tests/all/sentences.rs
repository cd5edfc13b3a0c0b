//! Embeddings of sentences against sentence-transformers; pooling against formulas.

use autograd::backward;
use models::Pooling;
use numcore::{
    DType, Tensor,
    ops::{PointwiseOps, ReduceOps, ViewOps},
};

use crate::common::*;

const MODES: [(Pooling, &str); 6] = [
    (Pooling::Cls, "cls"),
    (Pooling::Max, "max"),
    (Pooling::Mean, "mean"),
    (Pooling::MeanSqrt, "mean_sqrt_len_tokens"),
    (Pooling::WeightedMean, "weightedmean"),
    (Pooling::Last, "lasttoken"),
];

#[test]
fn pooling_is_its_formula_with_padding_on_either_side() {
    let states = Tensor::uniform(&cpu(), [4, 5, 3], DType::F64, -1.0, 1.0, 1).unwrap();
    let rows = [[1i64, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]];
    let mask = V::new(Tensor::from_slice(&cpu(), [4, 5], &rows.concat()).unwrap());
    let values = states.to_f64s().unwrap();
    for (pooling, name) in MODES {
        let got = pooling.apply(&V::new(states.clone()), &mask).unwrap().value().unwrap().to_f64s().unwrap();
        for (b, row) in rows.iter().enumerate() {
            let seen: Vec<usize> = (0..5).filter(|&t| row[t] == 1).collect();
            for c in 0..3 {
                let at = |t: usize| values[(b * 5 + t) * 3 + c];
                let mean = |weights: &[f64]| {
                    let sum: f64 = seen.iter().zip(weights).map(|(&t, w)| w * at(t)).sum();
                    (sum, weights.iter().sum::<f64>())
                };
                let (ones, places) = (vec![1.0; seen.len()], seen.iter().map(|&t| t as f64 + 1.0).collect::<Vec<_>>());
                let due = match pooling {
                    Pooling::Cls => at(0),
                    _ if seen.is_empty() => 0.0,
                    Pooling::Max => seen.iter().map(|&t| at(t)).fold(f64::MIN, f64::max),
                    Pooling::Mean => mean(&ones).0 / seen.len() as f64,
                    Pooling::MeanSqrt => mean(&ones).0 / (seen.len() as f64).sqrt(),
                    Pooling::WeightedMean => mean(&places).0 / mean(&places).1,
                    Pooling::Last => at(seen[seen.len() - 1]),
                };
                assert!((got[b * 3 + c] - due).abs() < 1e-12, "{name}, row {b}");
            }
        }
    }
    let (long, short) = (V::new(states.clone()), mask.narrow(1, 0, 4).unwrap());
    let error = Pooling::Mean.apply(&long, &short).unwrap_err().to_string();
    assert!(error.contains("[B, T, C]") && error.contains("[4, 5, 3]") && error.contains("[4, 4]"), "{error}");
}

#[test]
fn long_texts_in_halves_are_pooled_as_in_floats() {
    for (dtype, unit) in [(DType::BF16, 2f64.powi(-8)), (DType::F16, 2f64.powi(-11))] {
        let states = Tensor::uniform(&cpu(), [1, 2100, 3], DType::F32, 0.5, 1.0, 1).unwrap().to_dtype(dtype).unwrap();
        let mask = V::new(Tensor::ones(&cpu(), [1, 2100], DType::I64).unwrap());
        let pooled = |states: &Tensor<_>, pooling: Pooling| {
            pooling.apply(&V::new(states.clone()), &mask).unwrap().value().unwrap().to_f64s().unwrap()
        };
        for (pooling, name) in MODES {
            let due = pooled(&states.to_dtype(DType::F64).unwrap(), pooling);
            let near = |(got, due): (&f64, &f64)| (got - due).abs() <= unit * due.abs();
            assert!(pooled(&states, pooling).iter().zip(&due).all(near), "{name} in {dtype}");
        }
    }
}

#[test]
fn gradients_of_pooling_reach_the_tokens_that_count() {
    let states = V::leaf("states", Tensor::uniform(&cpu(), [2, 3, 2], DType::F64, -1.0, 1.0, 1).unwrap()).unwrap();
    let mask = V::new(Tensor::from_slice(&cpu(), [2, 3], &[1i64, 1, 0, 1, 0, 0]).unwrap());
    for (pooling, name) in MODES {
        let loss = pooling.apply(&states, &mask).unwrap().square().unwrap().sum_all().unwrap();
        let gradients = backward(&loss).unwrap();
        let gradient = gradients.of(&states).unwrap().to_f64s().unwrap();
        assert!(gradient.iter().all(|g| g.is_finite()) && gradient.iter().any(|g| *g != 0.0), "{name}");
        let padding = [4, 5, 8, 9, 10, 11];
        assert!(padding.iter().all(|&k| gradient[k] == 0.0), "{name}: {gradient:?}");
    }
}

#[cfg(feature = "text")]
mod texts {
    use models::{SentenceEncoder, cosine_similarities};
    use nn::{ModuleExt, loss::info_nce};
    use serde_json::json;

    use super::*;

    fn encoder() -> SentenceEncoder<runtime_cpu::Cpu> {
        SentenceEncoder::from_pretrained(reference("sentences"), &init()).unwrap()
    }

    fn texts() -> Vec<String> {
        facts("sentences")["texts"].as_array().unwrap().iter().map(|text| text.as_str().unwrap().into()).collect()
    }

    #[test]
    fn vectors_are_those_of_sentence_transformers() {
        let (mut encoder, texts, due) = (encoder(), texts(), Reference::read("sentences"));
        assert_eq!((encoder.most_tokens, &encoder.pooling[..], encoder.normalizes), (11, &[Pooling::Mean][..], true));
        let whole = encoder.encode(&texts).unwrap();
        close("whole", &whole, &due.tensor("whole"), 2e-6);
        close("similarities", &cosine_similarities(&whole, &whole).unwrap(), &due.tensor("similarities"), 2e-6);
        // Each text alone has the bits that it has among others.
        for (k, text) in texts.iter().enumerate() {
            assert_eq!(
                encoder.encode(&[text]).unwrap().to_f64s().unwrap(),
                whole.narrow(0, k, 1).unwrap().to_f64s().unwrap()
            );
        }
        (encoder.normalizes, encoder.default_prompt) = (false, None);
        for (pooling, name) in MODES {
            encoder.pooling = vec![pooling];
            close(name, &encoder.encode(&texts).unwrap(), &due.tensor(name), 5e-6);
        }
        encoder.pooling = vec![Pooling::Mean, Pooling::Cls];
        let joined = encoder.encode(&texts).unwrap();
        close("joined", &joined.narrow(1, 12, 12).unwrap(), &due.tensor("cls"), 5e-6);
        assert_eq!(encoder.encode(&[""; 0]).unwrap().dims(), [0, 24]);
    }

    #[test]
    fn it_trains_on_pairs_and_its_parameters_have_the_encoders_names() {
        let encoder = encoder();
        assert_eq!(encoder.named_parameters().len(), encoder.encoder.named_parameters().len());
        assert!(
            encoder
                .named_parameters()
                .iter()
                .any(|(name, _)| name == "layers.0.attention.qkv.weight" || name.starts_with("layers.0."))
        );
        let tokens = |texts: [&str; 2]| texts.map(|text| encoder.tokens("", text).unwrap());
        let (a, b) = (tokens(["the sea", "a mountain"]), tokens(["we swim in the cold sea", "we climbed"]));
        let loss = info_nce(&encoder.embed(&a).unwrap(), &encoder.embed(&b).unwrap(), 0.05).unwrap();
        let gradients = backward(&loss).unwrap();
        assert!(encoder.parameters().iter().filter(|p| gradients.of(&p.var()).is_some()).count() > 20);
    }

    #[test]
    fn older_folders_name_pooling_by_flags_and_a_limit_of_tokens() {
        let folder = Scratch::copy_of("sentences");
        let write = |file: &str, text: &str| std::fs::write(folder.0.join(file), text).unwrap();
        write("1_Pooling/config.json", r#"{"pooling_mode_max_tokens": true, "pooling_mode_cls_token": true}"#);
        write("sentence_bert_config.json", r#"{"max_seq_length": 5, "do_lower_case": false}"#);
        write(
            "modules.json",
            r#"[{"type": "sentence_transformers.models.Transformer", "path": ""},
            {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]"#,
        );
        let encoder = SentenceEncoder::from_pretrained(&folder.0, &init()).unwrap();
        assert_eq!((&encoder.pooling[..], encoder.normalizes), (&[Pooling::Cls, Pooling::Max][..], false));
        let long = encoder.tokens("", "the sea is wide and cold").unwrap();
        // The special tokens stay.
        assert_eq!((long.len(), long[0], long[4]), (5, 2, 3));
    }

    /// A folder asks for something that is not computed: an error by name.
    #[test]
    fn folders_that_ask_for_more_are_refused() {
        let broken = |file: &str, change: &dyn Fn(&mut serde_json::Value)| {
            let folder = Scratch::copy_of("sentences");
            let path = folder.0.join(file);
            let mut value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            change(&mut value);
            std::fs::write(&path, value.to_string()).unwrap();
            SentenceEncoder::from_pretrained(&folder.0, &init()).unwrap_err().to_string()
        };
        type Change = dyn Fn(&mut serde_json::Value);
        let cases: [(&str, &Change, &str); 7] = [
            ("modules.json", &|v| v[2]["type"] = json!("sentence_transformers.models.Dense"), "Dense"),
            ("modules.json", &|v| *v = json!([v[0]]), "Pooling"),
            ("modules.json", &|v| *v = json!({"type": "Transformer"}), "list"),
            ("1_Pooling/config.json", &|v| v["pooling_mode"] = json!("attention"), "attention"),
            ("1_Pooling/config.json", &|v| v["include_prompt"] = json!(false), "include_prompt"),
            ("config_sentence_transformers.json", &|v| v["default_prompt_name"] = json!("x"), "default_prompt_name"),
            ("config.json", &|v| v["hidden_act"] = json!("soft"), "hidden_act"),
        ];
        for (file, change, words) in cases {
            let error = broken(file, change);
            assert!(error.contains(words), "{file}: {error}");
        }
    }
}
