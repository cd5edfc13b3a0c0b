//! Datasets in files: well-formed records are read. A malformed one is an error that names its place and leaves the
//! rest readable.

use std::{collections::BTreeMap, io::Write};

use crate::common::Folder;
use data::{
    Array, Dataset, Loader,
    sources::{Cell, Characters, Csv, JsonLines, SafetensorsRows, TarShards, TextFolder, TextLines, read_idx},
};
use flate2::{Compression, write::GzEncoder};
use numcore::Result;
use runtime_cpu::Cpu;

fn says<T>(result: Result<T>, words: &[&str]) {
    let error = result.err().expect("an error").to_string();
    assert!(words.iter().all(|word| error.contains(word)), "{error} should say {words:?}");
}

fn gz(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn gz_best(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Makes an IDX file from its header and numbers.
fn idx(code: u8, sizes: &[u32], values: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0, 0, code, sizes.len() as u8];
    sizes.iter().for_each(|size| bytes.extend(size.to_be_bytes()));
    bytes.extend_from_slice(values);
    bytes
}

#[test]
fn idx_files_of_every_type_are_read() {
    let folder = Folder::new("idx");
    let bytes = idx(0x08, &[2, 1, 3], &[1, 2, 3, 4, 5, 255]);
    // Several members, as `cat` makes, and zeros that fill a block.
    let members = [gz(&bytes[..3]), gz(&bytes[3..]), vec![0; 20]].concat();
    for (name, bytes) in [("plain", bytes.clone()), ("packed.gz", gz(&bytes)), ("members.gz", members)] {
        let images = read_idx(folder.file(name, bytes)).unwrap();
        assert_eq!((images.dims(), images.to_vec::<u8>().unwrap()), (&[2, 1, 3][..], vec![1, 2, 3, 4, 5, 255]));
    }
    let read = |code, values: &[u8], n| read_idx(folder.file("numbers", idx(code, &[n], values))).unwrap();
    assert_eq!(read(0x09, &[0xff, 2], 2).to_vec::<i32>().unwrap(), [-1, 2]);
    assert_eq!(read(0x0b, &[0xff, 0xfe], 1).to_vec::<i32>().unwrap(), [-2]);
    assert_eq!(read(0x0c, &[0, 0, 1, 2], 1).to_vec::<i32>().unwrap(), [258]);
    assert_eq!(read(0x0d, &1.5f32.to_be_bytes(), 1).to_vec::<f32>().unwrap(), [1.5]);
    assert_eq!(read(0x0e, &(-2.5f64).to_be_bytes(), 1).to_vec::<f64>().unwrap(), [-2.5]);
    // Deflate packs by up to 1032.
    let zeros = read_idx(folder.file("zeros.gz", gz_best(&idx(0x08, &[1 << 22], &vec![0; 1 << 22])))).unwrap();
    assert_eq!(zeros.dims(), [1 << 22]);
    assert_eq!(read_idx(folder.file("empty", idx(0x08, &[0, 28], &[]))).unwrap().dims(), [0, 28]);
}

#[test]
fn malformed_idx_files_are_errors() {
    let folder = Folder::new("bad-idx");
    for (bytes, words) in [
        (vec![0, 0], &["bad", "shorter than the header"][..]),
        (idx(0x08, &[3], &[1, 2]), &["bad", "sizes [3]", "2 bytes"]),
        (idx(0x08, &[1], &[1, 2]), &["sizes [1]"]),
        (idx(0x0c, &[1], &[1, 2]), &["numbers of 4 bytes"]),
        (idx(0x07, &[1], &[1]), &["0x07 is the code of no number type"]),
        (vec![1, 0, 8, 1, 0, 0, 0, 0], &["two zeros"]),
        (vec![0, 0, 8, 3, 0, 0], &["within its sizes"]),
        (idx(0x08, &[u32::MAX, u32::MAX, u32::MAX], &[]), &["do not fit"]),
        (idx(0x08, &[1 << 31, 1 << 31, 4], &[]), &["do not fit"]),
        (idx(0x08, &[1; 9], &[1]), &["bad", "rank is 9"]),
    ] {
        says(read_idx(folder.file("bad", bytes)), words);
    }
    let packed = gz(&idx(0x08, &[1000], &(0..1000).map(|i| (i * 7919 % 251) as u8).collect::<Vec<_>>()));
    says(read_idx(folder.file("cut.gz", &packed[..packed.len() / 2])), &["cut.gz"]);
    // A few bytes that unpack to very many: no more of them are read than the sizes need.
    let bomb = idx(0x08, &[2], &[0; 1 << 20]);
    says(read_idx(folder.file("bomb.gz", gz(&bomb))), &["bomb.gz", "do not fit", "17 bytes"]);
    says(read_idx(folder.path("missing")), &["missing"]);
}

#[test]
fn csv_is_read_as_its_standard_has_it() {
    let folder = Folder::new("csv");
    let text = "name,x,y\r\nplain,1,2.5\r\n\"with, comma\",-3,\" 4\"\r\n\"two \"\"quoted\"\"\nlines\",5,6\n\nlast,7,";
    let csv = Csv::open(folder.file("a.csv", text)).unwrap();
    assert_eq!((csv.columns(), csv.len()), (&["name", "x", "y"].map(String::from)[..], 4));
    let names: Vec<String> = (0..4).map(|i| csv.get(i).unwrap().text("name").unwrap().to_owned()).collect();
    assert_eq!(names, ["plain", "with, comma", "two \"quoted\"\nlines", "last"]);
    assert_eq!(csv.get(1).unwrap().numbers(&["x", "y"]).unwrap().to_vec::<f32>().unwrap(), [-3.0, 4.0]);
    // Line numbers are those of the file, whatever quotes hold.
    says(csv.get(3).unwrap().number::<f32>("y"), &["a.csv: line 7: column `y` is ``, no number"]);
    says(csv.get(0).unwrap().text("z"), &["line 2", "no column `z` among", "name"]);
    says(csv.get(0).unwrap().number::<u8>("y"), &["2.5"]);
    says(csv.get(4), &["index is 4, and must be in 0..4"]);
    let twice = Csv::open(folder.file("twice.csv", "a,b,a\n1,2,3\n")).unwrap().get(0).unwrap();
    says(twice.text("a"), &["twice.csv: line 2: there are several columns `a`"]);
    assert_eq!(twice.text("b").unwrap(), "2");
    let marked = Csv::open(folder.file("mark.csv", "\u{feff}\"na\nme\",size\r\nnail,5\" long\nbolt,\"6\"\n")).unwrap();
    assert_eq!(marked.columns(), ["na\nme", "size"], "a byte order mark, then a quote");
    assert_eq!((marked.len(), marked.get(0).unwrap().text("size").unwrap()), (2, "5\" long"));
    assert_eq!(marked.get(1).unwrap().number::<u8>("size").unwrap(), 6);
    for (name, text) in [("cr", "a,b\r1,\"x\ry\"\r2,b\r"), ("mixed", "a,b\n1,\"x\ry\"\r\n\r\n2,b\r")] {
        let csv = Csv::open(folder.file(name, text)).unwrap();
        let second: Vec<String> = (0..csv.len()).map(|i| csv.get(i).unwrap().fields[1].clone()).collect();
        assert_eq!((csv.columns(), second), (&["a", "b"].map(String::from)[..], vec!["x\ry".into(), "b".into()]));
        says(csv.get(1).unwrap().number::<u8>("b"), &[if name == "cr" { "line 4" } else { "line 5" }]);
    }
    says(Csv::open(folder.file("packed.csv", gz(b"a,b\n1,2\n"))), &["packed.csv", "gzip", "unpack it"]);
    let tabs = Csv::with_columns(folder.file("b.tsv", "1\t2\n3\t4\n"), b'\t', &["a", "b"]).unwrap();
    assert_eq!((tabs.len(), tabs.get(1).unwrap().number::<i64>("b").unwrap()), (2, 4));
}

#[test]
fn a_malformed_record_leaves_the_others() {
    let folder = Folder::new("bad-csv");
    let bytes = [b"x,y\n1,2\n3\n4,5\n\"6\"7,8\n".as_slice(), &[0xff, 0xfe], b",9\n10,11\n\"12,13\n"].concat();
    let csv = Csv::open(folder.file("a.csv", bytes)).unwrap();
    let good: Vec<usize> = (0..csv.len()).filter(|&i| csv.get(i).is_ok()).collect();
    assert_eq!((csv.len(), good), (7, vec![0, 2, 5]));
    says(csv.get(1), &["a.csv: line 3: has 1 fields, and there are 2 columns"]);
    says(csv.get(3), &["line 5: field 1 goes on after its closing quote"]);
    says(csv.get(4), &["line 6: is no UTF-8 text"]);
    says(csv.get(6), &["line 8: a quote is opened and never closed"]);
    says(Csv::open(folder.file("none.csv", "")), &["none.csv", "no names of columns"]);
    assert_eq!(Csv::open(folder.file("header.csv", "x,y")).unwrap().len(), 0);
}

#[test]
fn json_lines_are_read_by_field() {
    let folder = Folder::new("jsonl");
    let text = "{\"text\": \"one\", \"n\": 1}\r\n\n{\"text\": \"zwei \\u00fc\"}\n{\"text\": 3}\n[1]\n{\"text\": \n  \n{\"text\":\"six\"}";
    let lines = JsonLines::open(folder.file("a.jsonl", text)).unwrap();
    assert_eq!(lines.len(), 6);
    assert_eq!((lines.get(0).unwrap().text("text").unwrap(), lines.get(0).unwrap().number("n").unwrap()), ("one", 1.0));
    says(lines.get(0).unwrap().number("text"), &["a.jsonl: line 1: field `text` is \"one\", no number"]);
    says(lines.get(1).unwrap().number("n"), &["a.jsonl: line 3: has no field `n`"]);
    says(lines.get(3).unwrap().text("text"), &["line 5: has no field `text`"]);
    says(lines.get(2).unwrap().numbers("text"), &["line 4: field `text` is 3, no list of numbers"]);
    says(lines.get(4), &["a.jsonl: line 6: is no JSON"]);
    let deep = r#"{"a.b": 1, "x.y": {"z": 2}, "a": {"b": 2, "c": {"d.e": [18446744073709551615, 1e3]}, "f": [true]}, "long": "LONG"}"#;
    let deep = deep.replace("LONG", &"ß".repeat(100));
    let row = JsonLines::open(folder.file("deep.jsonl", deep)).unwrap().get(0).unwrap();
    assert_eq!((row.number("a.b").unwrap(), row.numbers("a.c.d.e").unwrap()), (1.0, vec![u64::MAX as f64, 1000.0]));
    assert_eq!(row.number("x.y.z").unwrap(), 2.0);
    assert_eq!(row.field("a.f").unwrap(), &Cell::List(vec![Cell::Bool(true)]));
    says(row.numbers("a.f"), &["field `a.f` is a list of 1, no list of numbers"]);
    says(row.number("long"), &["ß\" and more, no number"]);
    says(row.field("a.c.d"), &["has no field `a.c.d`"]);
    let texts = lines.texts("text");
    let read: Vec<Option<String>> = (0..6).map(|i| texts.get(i).ok()).collect();
    assert_eq!(read, [Some("one".into()), Some("zwei ü".into()), None, None, None, Some("six".into())]);
    says(texts.get(2), &["line 4: field `text` is 3, no text"]);
    for (name, due) in [("", 0), ("\u{feff}", 0), ("\u{feff}{\"text\": 1}\r{\"text\": 12345678901234567.0}\r", 2)] {
        let lines = JsonLines::open(folder.file("few", name)).unwrap();
        assert_eq!((lines.len(), (0..due).all(|i| lines.get(i).is_ok())), (due, true), "{name:?}");
        // To the last bit.
        assert!(due == 0 || lines.get(1).unwrap().number("text").unwrap() == 12345678901234568.0);
    }
}

#[test]
fn text_is_read_by_file_and_by_line() {
    let folder = Folder::new("text");
    folder.file("b.txt", "\u{feff}bee");
    folder.file("a/z.txt", "zed");
    folder.file("a/c.md", "other");
    folder.file("bad.txt", b"ok\nno\xff");
    let texts = TextFolder::open(&folder, "txt").unwrap();
    let paths: Vec<_> =
        texts.paths().iter().map(|p| p.strip_prefix(&folder).unwrap().to_str().unwrap().to_owned()).collect();
    assert_eq!(paths, ["a/z.txt", "b.txt", "bad.txt"]);
    assert_eq!([texts.get(0).unwrap().text, texts.get(1).unwrap().text], ["zed", "bee"]);
    says(texts.get(2), &["bad.txt: line 2: no UTF-8 text from byte 5 on"]);
    says(TextFolder::open(&folder, "rst"), &["no file *.rst"]);
    says(TextFolder::open(folder.path("none"), "txt"), &["none"]);
    let lines = TextLines::open(folder.file("lines", "\u{feff}one\n \ntwo\r\nthree\r")).unwrap();
    assert_eq!((0..3).map(|i| lines.get(i).unwrap()).collect::<Vec<_>>(), ["one", "two", "three"]);
    says(lines.get(3), &["index is 3, and must be in 0..3"]);
}

#[test]
fn characters_are_tokens() {
    let vocabulary = Characters::of("weft, warp");
    let tokens = vocabulary.encode("warp, weft").unwrap();
    assert_eq!(vocabulary.decode(&tokens).unwrap(), "warp, weft");
    assert_eq!((vocabulary.token('z'), vocabulary.token(' ')), (None, Some(0)));
    says(vocabulary.encode("zebra"), &["'z' is not in the vocabulary"]);
    says(vocabulary.decode(&[99]), &["token is 99, and must be in 0..9"]);
}

#[test]
fn rows_of_safetensors_are_examples() {
    let (folder, cpu) = (Folder::new("safetensors"), Cpu::new());
    let tensor = |array: Array| array.to_tensor(&cpu).unwrap();
    let x = Array::new([4, 2], (0..8).map(|i| i as f32).collect()).unwrap();
    let y = Array::from_vec(vec![10i64, 11, 12, 13]);
    let path = folder.path("rows.safetensors");
    let save = |entries: &[(&str, &Array)]| {
        let entries: Vec<_> =
            entries.iter().map(|(name, array)| (name.to_string(), tensor((*array).clone()))).collect();
        numcore::safetensors::save(&path, &entries, &BTreeMap::new()).unwrap();
    };
    save(&[("x", &x), ("y", &y)]);
    let rows = SafetensorsRows::open(&path).unwrap();
    assert_eq!((rows.len(), rows.columns().count()), (4, 2));
    let row = rows.get(2).unwrap();
    assert_eq!((row["x"].to_vec::<f32>().unwrap(), row["y"].dims()), (vec![4.0, 5.0], &[][..]));
    // From several threads at once.
    let loader = Loader::new(rows).batch(2).workers(4).stack();
    let batches: Vec<_> = loader.epoch(0).unwrap().map(|batch| batch.unwrap().data).collect();
    assert_eq!(batches[1]["y"].to_vec::<i64>().unwrap(), [12, 13]);
    save(&[("x", &x), ("y", &Array::from_vec(vec![1i64]))]);
    says(SafetensorsRows::open(&path), &["`x` [4, 2]", "`y` [1]", "differ in their number of rows"]);
    save(&[]);
    says(SafetensorsRows::open(&path), &["no tensor"]);
    // No column is left out.
    let header =
        r#"{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"y":{"dtype":"I8","shape":[1],"data_offsets":[1,2]}}"#;
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[1, 2]].concat();
    says(SafetensorsRows::open(folder.file("narrow.safetensors", bytes)), &["`y` has element type I8"]);
}

fn tar(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, bytes) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, *bytes).unwrap();
    }
    builder.into_inner().unwrap()
}

#[test]
fn shards_are_read_as_webdataset_names_them() {
    let folder = Folder::new("tar");
    let long = "d/".repeat(80);
    let deep = format!("{long}b.txt");
    let one = folder.file(
        "1.tar",
        tar(&[
            ("a/7.jpg", b"picture"),
            ("a/7.cls", b"3"),
            ("a/8.seg.png", b"s"),
            ("README", b"no field"),
            (".hidden", b""),
        ]),
    );
    let two = folder.file("2.tar", tar(&[(&deep, b"text"), ("c.txt", b"")]));
    let shards = TarShards::open([one, two]).unwrap();
    assert_eq!((shards.len(), shards.torn().len()), (4, 0));
    assert_eq!((shards.key(0), shards.key(3), shards.key(4)), (Some("a/7"), Some("c"), None));
    let first = shards.get(0).unwrap();
    assert_eq!((first.field("jpg").unwrap(), first.text("cls").unwrap()), (&b"picture"[..], "3"));
    assert_eq!(shards.get(1).unwrap().field("seg.png").unwrap(), b"s");
    assert_eq!((shards.get(2).unwrap().key, shards.get(2).unwrap().fields["txt"].len()), (format!("{long}b"), 4));
    says(first.field("json"), &["a/7: there is no field `json` among cls, jpg"]);
    says(shards.get(4), &["index is 4, and must be in 0..4"]);
    // A link is no file.
    let (mut builder, mut link) = (tar::Builder::new(Vec::new()), tar::Header::new_gnu());
    link.set_entry_type(tar::EntryType::Symlink);
    link.set_size(0);
    builder.append_link(&mut link, "a.y", "a.x").unwrap();
    let linked = [tar(&[("a.x", b"1")]), builder.into_inner().unwrap()].concat();
    let linked = TarShards::open([folder.file("linked.tar", linked)]).unwrap();
    assert!(linked.get(0).unwrap().fields.keys().eq(["x"]));
    // Put together, as `cat` does: each ends with blocks of zeros.
    let parts = [tar(&[("a.x", b"1"), ("b.x", b"2")]), tar(&[("c.x", b"3")])];
    let both = TarShards::open([folder.file("both.tar", parts.concat())]).unwrap();
    assert_eq!((both.len(), both.torn().len(), both.get(2).unwrap().text("x").unwrap()), (3, 0, "3"));
    // Bytes behind the end of a complete archive are reported, and cost no example.
    let behind = TarShards::open([folder.file("behind.tar", [&parts[0][..], &[7; 512]].concat())]).unwrap();
    assert_eq!((behind.len(), behind.torn().len()), (2, 1));
    says(TarShards::open([folder.file("packed.tar", gz(&parts[0]))]), &["packed.tar", "gzip", "unpack it"]);
}

#[test]
fn a_damaged_shard_keeps_what_comes_before() {
    let folder = Folder::new("bad-tar");
    let whole = tar(&[("a.x", &[1; 600]), ("a.y", b"1"), ("b.x", b"2"), ("c.x", &[3; 2000]), ("c.y", b"4")]);
    // The first example has a header and two blocks, a header and one; the next a header and one.
    let mut broken = whole.clone();
    broken[7 * 512 + 148..7 * 512 + 156].fill(b'9');
    let cases = [("cut.tar", whole[..8 * 512 + 700].to_vec()), ("broken.tar", broken)];
    for (name, bytes) in cases {
        let shards = TarShards::open([folder.file(name, bytes)]).unwrap();
        let keys: Vec<_> = (0..shards.len()).map(|i| shards.get(i).unwrap().key).collect();
        assert_eq!(keys, ["a"], "{name}: `b` may lack a field");
        assert!(shards.torn()[0].to_string().contains(&format!("{name}: entry 3")), "{}", shards.torn()[0]);
    }
    // A file cut between two entries: only the missing end mark shows it.
    let cut = TarShards::open([folder.file("even.tar", &whole[..7 * 512])]).unwrap();
    assert_eq!((cut.len(), cut.torn().len()), (1, 1));
    assert!(cut.torn()[0].to_string().contains("ends without the blocks"), "{}", cut.torn()[0]);
    says(TarShards::open([folder.file("no.tar", [7; 2048])]), &["no.tar: entry 0"]);
    says(TarShards::open([folder.path("missing.tar")]), &["missing.tar"]);
    let twice =
        TarShards::open([folder.file("twice.tar", tar(&[("a.x", b"1"), ("a.x", b"2"), ("b.x", b"3")]))]).unwrap();
    says(twice.get(0), &["twice.tar", "`a` has two files for one field"]);
    assert!(twice.get(1).is_ok());
}

#[test]
fn errors_name_the_caller_s_line() {
    let folder = Folder::new("lines");
    let path = folder.file("a.csv", "x,y\n1,z\n");
    let row = Csv::open(&path).unwrap().get(0).unwrap();
    let errors = [
        Csv::open("no such file").map(|_| ()),
        row.text("z").map(|_| ()),
        row.numbers(&["x", "y"]).map(|_| ()),
        JsonLines::open("no such file").map(|_| ()),
        read_idx("no such file").map(|_| ()),
        Array::new([2], vec![1.0f32]).map(|_| ()),
        Array::stack(&[]).map(|_| ()),
        data::pad::<f32>(&[], 0.0, 0).map(|_| ()),
        data::pack::first_fit(&[1], 0, 1).map(|_| ()),
        Loader::new(Csv::open(&path).unwrap()).batch(0).epoch(0).map(|_| ()),
    ];
    for (k, error) in errors.into_iter().map(Result::unwrap_err).enumerate() {
        assert_eq!(error.location().map(|at| at.file()), Some(file!()), "{k}: {error}");
    }
}
