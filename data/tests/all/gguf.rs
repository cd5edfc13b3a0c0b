//! GGUF files: types against gguf's own dequantising, files that are odd or malformed, changed bytes.

use data::gguf::{GgufFile, GgufType, GgufValue, put_text};
use numcore::rng::Philox;

use crate::common::Folder;

fn golden(name: &str) -> Vec<u8> {
    std::fs::read(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/references/gguf").join(name))
        .unwrap()
}

/// A tensor of a file under construction: name, sizes innermost first, type, offset.
type Entry<'a> = (&'a str, &'a [u64], u32, u64);

/// A file of these pairs and entries, with `data` bytes of 7 behind them.
fn file(pairs: &[(&str, GgufValue)], entries: &[Entry<'_>], data: usize) -> Vec<u8> {
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend((entries.len() as u64).to_le_bytes());
    bytes.extend((pairs.len() as u64).to_le_bytes());
    for (key, value) in pairs {
        put_text(&mut bytes, key);
        value.put(&mut bytes);
    }
    for (name, dims, kind, at) in entries {
        put_text(&mut bytes, name);
        bytes.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|n| bytes.extend(n.to_le_bytes()));
        bytes.extend(kind.to_le_bytes());
        bytes.extend(at.to_le_bytes());
    }
    let alignment = pairs.iter().find(|(key, _)| *key == "general.alignment").and_then(|(_, v)| v.count());
    bytes.resize(bytes.len().next_multiple_of(alignment.unwrap_or(32).max(1) as usize), 0);
    bytes.extend(vec![7; data]);
    bytes
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

#[test]
fn blocks_are_dequantised_to_the_bits_of_gguf() {
    let folder = Folder::new("gguf-types");
    let file = GgufFile::open(folder.file("types.gguf", golden("types.gguf"))).unwrap();
    assert_eq!(file.get("general.alignment"), Some(&GgufValue::U32(64)));
    let due = floats(&golden("types.f32"));
    let names = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "mxfp4"];
    assert_eq!(file.names().count(), names.len());
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for (name, due) in names.into_iter().zip(due.chunks_exact(512)) {
        let (kind, shape) = file.tensor(name).unwrap();
        assert_eq!((format!("{kind:?}").to_lowercase(), &shape[..]), (name.to_owned(), &[2, 256][..]));
        // Pieces begin and end within blocks.
        for (from, count) in [(0, 512), (0, 1), (31, 2), (255, 3), (100, 300), (511, 1), (512, 0)] {
            let mut bytes = vec![0; 4 * count];
            file.read(name, from, &mut bytes).unwrap();
            assert_eq!(bits(&floats(&bytes)), bits(&due[from..from + count]), "{name} from {from}");
        }
        for (from, len) in [(512, 4), (0, 2052), (usize::MAX, 4), (0, 3)] {
            assert!(file.read(name, from, &mut vec![0; len]).is_err());
        }
    }
}

#[test]
fn odd_files_are_read() {
    let folder = Folder::new("gguf-odd");
    let pairs = [
        ("general.alignment", GgufValue::U32(8)),
        ("texts", GgufValue::Texts(vec![])),
        ("i32s", GgufValue::I32s(vec![])),
        ("big", GgufValue::U64(u64::MAX)),
        ("low", GgufValue::I64(-1)),
        ("wide", GgufValue::F64(0.1)),
        ("near", GgufValue::F32(1e-5)),
    ];
    let entries =
        [("b", &[2u64, 1][..], 0, 8), ("a", &[2][..], 30, 0), ("empty", &[0, 3][..], 0, 16), ("one", &[][..], 0, 24)];
    let file = GgufFile::open(folder.file("odd.gguf", file(&pairs, &entries, 28))).unwrap();
    for (key, value) in &pairs {
        assert_eq!(file.get(key), Some(value));
    }
    assert_eq!(file.get("near").unwrap().number(), Some(1e-5));
    assert_eq!(file.names().collect::<Vec<_>>(), ["a", "b", "empty", "one"]);
    let (kind, shape) = file.tensor("b").unwrap();
    assert_eq!((kind, &shape[..]), (GgufType::F32, &[1, 2][..]));
    let mut bytes = [0; 4];
    file.read("b", 1, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 4]);
    file.read("one", 0, &mut bytes).unwrap();
    file.read("empty", 0, &mut []).unwrap();
    assert!(GgufFile::is_at(file.path()) && !GgufFile::is_at(folder.path(".")));
}

#[test]
fn malformed_files_are_errors_that_say_why() {
    let folder = Folder::new("gguf-malformed");
    let error = |bytes: Vec<u8>| GgufFile::open(folder.file("x.gguf", bytes)).unwrap_err().to_string();
    let text = |t: &str| GgufValue::Text(t.into());
    let row: &[u64] = &[32];
    let with = |key: &str, value: GgufValue| file(&[(key, value)], &[("a", row, 0, 0)], 128);
    let tensors = |entries: &[Entry<'_>]| file(&[], entries, 256);
    let plain = with("key", text("value"));
    let changed = |at: usize, to: &[u8]| {
        let mut bytes = plain.clone();
        bytes[at..at + to.len()].copy_from_slice(to);
        bytes
    };
    // The key's length is at 24, the key at 32, the type at 35, the value's length at 39.
    for (bytes, due) in [
        (changed(0, b"GGML"), "begin with `GGUF`"),
        (changed(4, &[0, 0, 0, 3]), "big-endian"),
        (changed(4, &[1]), "version 1"),
        (changed(8, &u64::MAX.to_le_bytes()), "cut off"),
        (changed(16, &[255; 7]), "cut off"),
        (changed(24, &[255; 8]), "cut off"),
        (changed(32, &[0xff]), "no UTF-8"),
        (changed(35, &[13]), "unknown type 13"),
        (changed(39, &[0, 0, 0, 0, 1]), "cut off"),
        (plain[..plain.len() - 1].to_vec(), "ends at"),
        (plain[..40].to_vec(), "cut off"),
        (Vec::new(), "cut off"),
        (file(&[("k", text("")), ("k", text(""))], &[], 0), "`k` twice"),
        (with("general.alignment", GgufValue::U32(0)), "power of two"),
        (with("general.alignment", GgufValue::U32(48)), "power of two"),
        (with("general.alignment", text("32")), "power of two"),
        (with("split.count", GgufValue::U32(2)), "one of 2 parts"),
        (tensors(&[("a", row, 0, 0), ("a", row, 0, 128)]), "`a` twice"),
        (tensors(&[("a", row, 0, 0), ("b", row, 0, 96)]), "`b` lies over"),
        (tensors(&[("a", row, 0, 256)]), "cut off"),
        (tensors(&[("a", row, 0, 1 << 59)]), "cut off"),
        (tensors(&[("a", row, 0, u64::MAX - 31)]), "no file holds"),
        (tensors(&[("a", row, 0, 4)]), "not aligned to 32"),
        (tensors(&[("a", row, 16, 0)]), "type 16; read are F32"),
        (tensors(&[("a", &[33], 8, 0)]), "no multiple of 32"),
        (tensors(&[("a", &[1, 1, 1, 1, 1], 0, 0)]), "5 axes"),
        (tensors(&[("a", &[1 << 40, 1 << 40], 0, 0)]), "no file holds"),
        (tensors(&[("a", &[u64::MAX], 0, 0)]), "no file holds"),
    ] {
        let error = error(bytes);
        assert!(error.contains(due) && error.contains("x.gguf"), "{error}, due {due}");
    }
    let file = GgufFile::open(folder.file("y.gguf", &plain)).unwrap();
    let error = file.typed("key", "a count", GgufValue::count).unwrap_err().to_string();
    assert!(error.contains("`key` is not a count"), "{error}");
    assert!(file.tensor("b").unwrap_err().to_string().contains("is not in"));
}

/// Opens and reads files with changed bytes: each is read, or an error.
#[test]
fn changed_bytes_are_errors_or_other_values() {
    let count = std::env::var("WEFTGRAD_TEST_MUTATIONS").ok().and_then(|n| n.parse().ok()).unwrap_or(300);
    let folder = Folder::new("gguf-fuzz");
    let (mut philox, mut opened) = (Philox::new(11, 0), 0);
    let mut below = |n: usize| philox.next_u64() as usize % n;
    for name in ["types.gguf", "pieces.gguf", "llama-f16.gguf"] {
        let whole = golden(name);
        for _ in 0..count {
            let mut bytes = whole.clone();
            for _ in 0..1 + below(4) {
                // Headers are changed most.
                let most = [64, 1500, usize::MAX][below(3)];
                let at = below(bytes.len().min(most));
                let values = [below(256) as u8, 0, 255, bytes[at] ^ 1 << below(8)];
                bytes[at] = values[below(4)];
            }
            if below(8) == 0 {
                let len = below(bytes.len());
                bytes.truncate(len);
            }
            let path = folder.file("fuzz.gguf", bytes);
            #[cfg(feature = "text")]
            drop(data::sources::Tokenizer::open(&path));
            let Ok(file) = GgufFile::open(path) else { continue };
            opened += 1;
            for name in file.names() {
                let (kind, shape) = file.tensor(name).unwrap();
                let mut bytes = vec![0; shape.numel() * kind.dtype().size()];
                file.read(name, 0, &mut bytes).unwrap();
            }
        }
    }
    assert!(opened > count / 4, "{opened} of {count} were opened");
}

#[cfg(feature = "text")]
mod text {
    use data::sources::Tokenizer;

    use super::*;

    #[test]
    fn tokens_of_pieces_are_those_of_sentencepiece() {
        let folder = Folder::new("gguf-pieces");
        let tokenizer = Tokenizer::open(folder.file("pieces.gguf", golden("pieces.gguf"))).unwrap();
        let due: serde_json::Value = serde_json::from_slice(&golden("pieces.json")).unwrap();
        for row in due["texts"].as_array().unwrap() {
            let text = row["text"].as_str().unwrap();
            let tokens: Vec<u32> =
                row["tokens"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u32).collect();
            assert_eq!(tokenizer.encode(text).unwrap(), tokens, "{text:?}");
            assert_eq!(tokenizer.decode(&tokens).unwrap(), row["decoded"].as_str().unwrap());
            let bos = due["bos"].as_u64().unwrap() as u32;
            assert_eq!(tokenizer.encode_with_special(text).unwrap()[0], bos, "{text:?}");
        }
        assert_eq!(tokenizer.len(), 330);
    }

    #[test]
    fn a_byte_level_tokenizer_is_that_of_its_folder() {
        let folder = Folder::new("gguf-bytes");
        let own = Tokenizer::open(folder.file("t.gguf", golden("tokenizer.gguf"))).unwrap();
        let due = Tokenizer::open(folder.file("t.json", golden("../chat/tokenizer.json"))).unwrap();
        for text in ["", "Hello there, 12 cats!", " naïve\n\n<s>x</s> 你好", "it's  two"] {
            let tokens = due.encode(text).unwrap();
            assert_eq!(own.encode(text).unwrap(), tokens, "{text:?}");
            assert_eq!(own.decode(&tokens).unwrap(), due.decode(&tokens).unwrap());
        }
        assert_eq!(own.len(), due.len());
    }

    #[test]
    fn unknown_tokenizers_are_errors() {
        let folder = Folder::new("gguf-unknown");
        let error = |pairs: &[(&str, GgufValue)]| {
            Tokenizer::open(folder.file("t.gguf", file(pairs, &[], 0))).unwrap_err().to_string()
        };
        let text = |key, value: &str| (key, GgufValue::Text(value.into()));
        let tokens =
            |list: &[&str]| ("tokenizer.ggml.tokens", GgufValue::Texts(list.iter().map(|t| t.to_string()).collect()));
        let model = |name: &str| text("tokenizer.ggml.model", name);
        let pre = |name: &str| text("tokenizer.ggml.pre", name);
        for (pairs, due) in [
            (vec![], "has no tokenizer"),
            (vec![model("gpt2")], "tokens` is missing"),
            (vec![model("gpt2"), tokens(&["a"])], "pre` is missing"),
            (vec![model("gpt2"), tokens(&["a"]), pre("tekken")], "`tekken`, which is not known"),
            (vec![model("bert"), tokens(&["a"])], "`bert`; known are"),
            (vec![model("gpt2"), tokens(&["a", "a"]), pre("gpt-2")], "`a` twice"),
            (vec![model("gpt2"), tokens(&["a"]), pre("gpt-2")], "merges` is missing"),
            (vec![model("llama"), tokens(&["a"])], "no list of each token's score"),
            (
                vec![model("llama"), tokens(&["a", "b", "ab"]), ("tokenizer.ggml.scores", GgufValue::F32s(vec![0.0]))],
                "shorter than the tokens",
            ),
            (
                vec![
                    model("gpt2"),
                    tokens(&["a"]),
                    pre("gpt-2"),
                    ("tokenizer.ggml.token_type", GgufValue::I32s(vec![])),
                ],
                "kind of each token",
            ),
            (
                vec![
                    model("gpt2"),
                    tokens(&["a"]),
                    pre("gpt-2"),
                    ("tokenizer.ggml.merges", GgufValue::Texts(vec![])),
                    ("tokenizer.ggml.add_bos_token", GgufValue::Bool(true)),
                    ("tokenizer.ggml.bos_token_id", GgufValue::U32(9)),
                ],
                "is 9, and there are 1 tokens",
            ),
        ] {
            let error = error(&pairs);
            assert!(error.contains(due), "{error}, due {due}");
        }
    }
}
