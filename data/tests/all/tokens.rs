//! Files of tokens: written tokens are read again, and malformed ones are an error that leaves the rest readable.

use crate::common::Folder;
use data::{
    Dataset, Loader,
    tokens::{
        IndexedTokens, IndexedTokensWriter, TokenFile, TokenSource, TokenType, TokenWindows, next_tokens, write_tokens,
    },
};

const ALL: [TokenType; 7] =
    [TokenType::U8, TokenType::I8, TokenType::U16, TokenType::I16, TokenType::U32, TokenType::I32, TokenType::I64];

#[test]
fn every_type_is_read_as_it_was_written() {
    let folder = Folder::new("types");
    for kind in ALL {
        let path = folder.path(kind.name());
        let tokens = [0, 1, 100, kind.largest() - 1, kind.largest()];
        write_tokens(&path, kind, &tokens).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), (5 * kind.size()) as u64);
        let open = || TokenFile::open(&path, kind).unwrap();
        for file in [open(), open().in_memory().unwrap()] {
            assert_eq!(file.tokens(0, 5).unwrap(), tokens, "{kind}");
            assert_eq!(file.tokens(2, 2).unwrap(), tokens[2..4]);
            assert_eq!(file.tokens(3, 1).unwrap(), tokens[3..4]);
            assert!(file.tokens(5, 0).unwrap().is_empty());
            let error = file.tokens(3, 3).unwrap_err().to_string();
            assert!(error.contains("end of the tokens is 6, and must be at most 5"), "{error}");
            assert!(file.tokens(u64::MAX, 2).is_err());
        }
        if kind.largest() < u32::MAX {
            let error = write_tokens(&path, kind, &[3, kind.largest() + 1]).unwrap_err().to_string();
            assert!(
                error.contains(&format!(
                    "token is {}, and must be at most {}, as {kind} holds; it is token 1",
                    kind.largest() as u64 + 1,
                    kind.largest()
                )),
                "{error}"
            );
        }
    }
}

#[test]
fn the_bytes_are_little_endian() {
    let folder = Folder::new("bytes");
    let path = folder.file("raw", [0x01, 0x02, 0xff, 0xff]);
    assert_eq!(TokenFile::open(&path, TokenType::U16).unwrap().tokens(0, 2).unwrap(), [0x0201, 0xffff]);
    assert_eq!(TokenFile::open(&path, TokenType::U32).unwrap().tokens(0, 1).unwrap(), [0xffff_0201]);
}

#[test]
fn malformed_files_of_tokens_are_errors() {
    let folder = Folder::new("malformed");
    let error = TokenFile::open(folder.file("odd", [1, 2, 3]), TokenType::U16).unwrap_err().to_string();
    assert!(error.contains("odd: its 3 bytes are no whole number of tokens of u16"), "{error}");
    assert!(TokenFile::open(folder.path("none"), TokenType::U16).unwrap_err().to_string().contains("none"));
    // A negative token: the tokens before and after it stay readable.
    let path = folder.file("negative", [5i32, -1, 7].iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>());
    let open = || TokenFile::open(&path, TokenType::I32).unwrap();
    for file in [open(), open().in_memory().unwrap()] {
        let error = file.tokens(0, 3).unwrap_err().to_string();
        assert!(error.contains("negative: byte 4: -1 is no token"), "{error}");
        assert_eq!([file.tokens(0, 1).unwrap(), file.tokens(2, 1).unwrap()], [[5], [7]]);
    }
    assert!(TokenFile::open(folder.file("empty", []), TokenType::U16).unwrap().in_memory().unwrap().is_empty());
    // A file that shrinks after it was opened.
    let path = folder.file("shrinks", [0; 8]);
    let file = TokenFile::open(&path, TokenType::U16).unwrap();
    std::fs::write(&path, [0; 2]).unwrap();
    assert!(file.tokens(0, 4).unwrap_err().to_string().contains("shrinks"));
}

#[test]
fn a_file_of_tokens_is_trained_on() {
    let folder = Folder::new("trained");
    let path = folder.path("tokens.bin");
    write_tokens(&path, TokenType::U16, &(0..1001).collect::<Vec<_>>()).unwrap();
    let windows = || TokenWindows::new(TokenFile::open(&path, TokenType::U16).unwrap(), 10).unwrap();
    let cpu = runtime_cpu::Cpu::new();
    let mut targets = Vec::new();
    for rank in 0..3 {
        let loader = Loader::new(windows()).batch(8).shuffle(1).rank(rank, 3).workers(2).collate(next_tokens).on(&cpu);
        for batch in loader.epoch(0).unwrap() {
            let batch = batch.unwrap();
            let (x, y) = (batch.data.0.to_vec::<i64>().unwrap(), batch.data.1.to_vec::<i64>().unwrap());
            assert!(x.iter().zip(&y).all(|(x, y)| x + 1 == *y));
            targets.extend_from_slice(&y[..10 * batch.count]);
        }
    }
    targets.sort_unstable();
    assert!(targets.into_iter().eq(1..=1000), "every token but the first is a target once");
}

/// An index as Megatron writes it, byte by byte.
fn index(code: u8, lengths: &[i32], offsets: &[i64], bounds: &[i64]) -> Vec<u8> {
    let mut bytes = b"MMIDIDX\x00\x00".to_vec();
    bytes.extend(1u64.to_le_bytes());
    bytes.push(code);
    bytes.extend((lengths.len() as u64).to_le_bytes());
    bytes.extend((bounds.len() as u64).to_le_bytes());
    lengths.iter().for_each(|x| bytes.extend(x.to_le_bytes()));
    offsets.iter().for_each(|x| bytes.extend(x.to_le_bytes()));
    bounds.iter().for_each(|x| bytes.extend(x.to_le_bytes()));
    bytes
}

fn corpus(folder: &Folder, name: &str, index: Vec<u8>) -> numcore::Result<IndexedTokens> {
    folder.file(&format!("{name}.bin"), [1u16, 2, 3, 4, 5, 6].iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>());
    folder.file(&format!("{name}.idx"), index);
    IndexedTokens::open(folder.path(name))
}

#[test]
fn megatrons_files_are_read() {
    let folder = Folder::new("megatron");
    // Two documents: the first of two sequences. A trailing mode of each sequence is no error.
    let mut bytes = index(8, &[2, 1, 3], &[0, 4, 6], &[0, 2, 3]);
    bytes.extend([0, 0, 0]);
    let tokens = corpus(&folder, "a.b", bytes).unwrap();
    assert_eq!((tokens.len(), tokens.sequences()), (2, 3));
    assert_eq!([tokens.get(0).unwrap(), tokens.get(1).unwrap()], [[1, 2, 3], [4, 5, 6]]);
    assert_eq!(tokens.sequence(1).unwrap(), [3]);
    assert_eq!(tokens.document_tokens(0, 1..3).unwrap(), [2, 3]);
    assert_eq!(tokens.document_tokens(0, 2..3).unwrap(), [3]);
    assert!(tokens.document_tokens(0, 3..3).unwrap().is_empty());
    assert!(
        tokens
            .document_tokens(0, 1..4)
            .unwrap_err()
            .to_string()
            .contains("end of the tokens is 4, and must be in 1..=3 in document 0")
    );
    assert!(tokens.get(2).is_err() && tokens.sequence(3).is_err());
}

#[test]
fn what_is_written_for_megatron_has_its_bytes() {
    let folder = Folder::new("writer");
    let mut writer = IndexedTokensWriter::create(folder.path("w"), TokenType::U16).unwrap();
    writer.document(&[1, 2, 3]).unwrap();
    writer.document(&[]).unwrap();
    writer.document(&[4]).unwrap();
    assert!(
        writer
            .document(&[70_000])
            .unwrap_err()
            .to_string()
            .contains("token is 70000, and must be at most 65535, as u16 holds; it is token 0")
    );
    writer.finish().unwrap();
    assert_eq!(std::fs::read(folder.path("w.bin")).unwrap(), [1, 0, 2, 0, 3, 0, 4, 0]);
    assert_eq!(std::fs::read(folder.path("w.idx")).unwrap(), index(8, &[3, 0, 1], &[0, 6, 6], &[0, 1, 2, 3]));
    let read = IndexedTokens::open(folder.path("w")).unwrap();
    assert_eq!((0..3).map(|d| read.get(d).unwrap().len()).collect::<Vec<_>>(), [3, 0, 1]);
    let error = IndexedTokensWriter::create(folder.path("w"), TokenType::U32).unwrap_err().to_string();
    assert!(error.contains("no code for u32; use i32"), "{error}");
}

#[test]
fn an_index_is_not_trusted() {
    let folder = Folder::new("untrusted");
    let good = || index(8, &[2, 4], &[0, 4], &[0, 1, 2]);
    let broken = |change: fn(&mut Vec<u8>)| {
        let mut bytes = good();
        change(&mut bytes);
        corpus(&folder, "broken", bytes).unwrap_err().to_string()
    };
    for (error, says) in [
        (broken(|b| b[0] = b'X'), "does not begin with MMIDIDX"),
        (broken(|b| b[9] = 2), "version 2"),
        (broken(|b| b[17] = 7), "7 is the code of no token type"),
        (broken(|b| b.truncate(20)), "past its end"),
        (broken(|b| b.truncate(60)), "do not fit into its 60 bytes"),
        (broken(|b| b[25] = 0xff), "do not fit"),
        (broken(|b| b[33] = 0xff), "do not fit"),
        // Numbers whose products, or the sum of those, are more than 64 bits.
        (
            broken(|b| b[18..34].copy_from_slice(&[(1u64 << 62).to_le_bytes(), (1u64 << 61).to_le_bytes()].concat())),
            "do not fit",
        ),
        (
            broken(|b| b[18..34].copy_from_slice(&[(u64::MAX / 12).to_le_bytes(), 1u64.to_le_bytes()].concat())),
            "do not fit",
        ),
    ] {
        assert!(error.contains(says) && error.contains("broken.idx"), "{error}");
    }
    // Misplaced sequences and documents: the others stay readable.
    for (lengths, offsets, bounds, says) in [
        ([-2, 4], [0, 4], [0, 1, 2], "sequence 0 has length -2"),
        ([2, 4], [-4, 4], [0, 1, 2], "sequence 0 lies at byte -4"),
        ([i32::MAX, 4], [0, 4], [0, 1, 2], "past its end at 12"),
        ([2, 4], [i64::MAX, 4], [0, 1, 2], "past its end at 12"),
        ([2, 4], [0, 4], [-1, 1, 2], "document 0 has sequences -1 to 1 of 2"),
    ] {
        let tokens = corpus(&folder, "misplaced", index(8, &lengths, &offsets, &bounds)).unwrap();
        let error = tokens.get(0).unwrap_err().to_string();
        assert!(error.contains(says) && error.contains("misplaced.bin"), "{error}");
        assert_eq!(tokens.get(1).unwrap(), [3, 4, 5, 6]);
    }
    let tokens = corpus(&folder, "misplaced", index(8, &[2, 4], &[0, 4], &[0, 1, 9])).unwrap();
    assert!(tokens.get(1).unwrap_err().to_string().contains("1 to 9 of 2") && tokens.get(0).is_ok());
    assert_eq!(corpus(&folder, "misplaced", index(8, &[], &[], &[])).unwrap().len(), 0);
}
