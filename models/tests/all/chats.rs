//! Chat templates and masks against transformers; templates that never end.

use data::sources::Tokenizer;
use models::{ChatDate, ChatTemplate, Conversation};
use serde_json::Value;

use crate::common::*;

fn template(name: &str) -> ChatTemplate {
    ChatTemplate::new(facts("chat")["templates"][name].as_str().unwrap(), "<s>", "</s>").unwrap()
}

/// The row of a case, with keys as they were written: `serde_json` would sort them.
fn conversation(case: &Value) -> Conversation {
    let tools = match &case["tools"] {
        Value::Null => "null",
        _ => concat!(
            r#"[{"type": "function", "function": {"name": "f", "description": "hé \"q\" <b>", "#,
            r#""a": [1, 2.5, true, null, {}]}}]"#
        ),
    };
    Conversation::from_json(&format!(r#"{{"messages": {}, "tools": {tools}}}"#, case["messages"])).unwrap()
}

#[test]
fn text_and_tokens_are_those_of_transformers() {
    let tokenizer = Tokenizer::open(reference("chat").join("tokenizer.json")).unwrap();
    let facts = facts("chat");
    let mut masks = 0;
    for case in facts["cases"].as_array().unwrap() {
        let (template, talk) = (template(case["template"].as_str().unwrap()), conversation(case));
        let prompt = case["prompt"].as_bool().unwrap();
        let text = template.render(&talk, prompt).unwrap();
        assert_eq!(text, case["text"].as_str().unwrap(), "{}", case["template"]);
        let ids =
            |value: &Value| value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect::<Vec<_>>();
        assert_eq!(tokenizer.encode(&text).unwrap(), ids(&case["ids"]));
        if let Some(learned) = case.get("learned") {
            let example = template.encode(&tokenizer, &talk).unwrap();
            assert_eq!(example.tokens, ids(&case["ids"]));
            let learned: Vec<bool> = ids(learned).into_iter().map(|mark| mark == 1).collect();
            assert_eq!(example.learned, learned, "{text}");
            masks += 1;
        }
    }
    assert_eq!(masks, 3);
}

#[test]
fn what_an_assistant_said_is_learned_by_any_template() {
    let tokenizer = Tokenizer::open(reference("chat").join("tokenizer.json")).unwrap();
    let talk =
        Conversation::new().with("user", "Hi").with("assistant", "Yes").with("user", "So").with("assistant", "No");
    for (name, due) in [("llama3", "Yes<|eot_id|>No<|eot_id|>"), ("mistral", " Yes</s> No</s>")] {
        let example = template(name).encode(&tokenizer, &talk).unwrap();
        let learned = example.tokens.iter().zip(&example.learned).filter(|(_, l)| **l).map(|(t, _)| *t);
        let special: String = learned
            .map(|token| {
                let text = tokenizer.decode(&[token]).unwrap();
                let names = [("</s>", tokenizer.token("</s>")), ("<|eot_id|>", tokenizer.token("<|eot_id|>"))];
                names.iter().find(|(_, n)| *n == Some(token)).map_or(text, |(name, _)| name.to_string())
            })
            .collect();
        assert_eq!(special, due);
    }
    // A text that changes with what comes later cannot be taken apart.
    let counted =
        ChatTemplate::new("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", "", "");
    let error = counted.unwrap().encode(&tokenizer, &talk).unwrap_err().to_string();
    assert!(error.contains("first 2 messages"), "{error}");
}

#[test]
fn the_template_of_a_folder() {
    let talk = Conversation::new().with("user", "Hi");
    let folder = Scratch::copy_of("chat");
    let due = template("chatml").render(&talk, true).unwrap();
    assert_eq!(ChatTemplate::of_folder(&folder.0).unwrap().render(&talk, true).unwrap(), due);
    std::fs::write(folder.0.join("chat_template.jinja"), "{{ bos_token }}{{ eos_token }}!\n").unwrap();
    assert_eq!(ChatTemplate::of_folder(&folder.0).unwrap().render(&talk, true).unwrap(), "<s></s>!");
    let source = "{{ pad_token }}{{ unk_token }}{{ cls_token is defined }}{{ mask_token }}";
    std::fs::write(folder.0.join("chat_template.jinja"), source).unwrap();
    let config = r#"{"pad_token": "<p>", "unk_token": {"content": "<u>"}, "mask_token": null}"#;
    std::fs::write(folder.0.join("tokenizer_config.json"), format!("\u{feff}{config}")).unwrap();
    assert_eq!(ChatTemplate::of_folder(&folder.0).unwrap().render(&talk, true).unwrap(), "<p><u>False");
    std::fs::remove_file(folder.0.join("chat_template.jinja")).unwrap();
    std::fs::write(folder.0.join("tokenizer_config.json"), "{}").unwrap();
    let error = ChatTemplate::of_folder(&folder.0).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("no chat model"), "{error}");
}

/// What Jinja of Python writes.
#[test]
fn numbers_and_json_are_written_as_python_writes_them() {
    let row = r#"{"messages": [{"role": "user", "x": [1e16, 1e-5, 0.0001, 1.5e16, -0.0, 2.0, 9e15, 7, -1.5e300]}]}"#;
    let render = |source: &str| {
        let template = ChatTemplate::new(source, "", "").unwrap();
        template.render(&Conversation::from_json(row).unwrap(), false).unwrap()
    };
    let due = "1e+16 1e-05 0.0001 1.5e+16 -0.0 2.0 9000000000000000.0 7 -1.5e+300 ";
    assert_eq!(render("{% for x in messages[0].x %}{{ x }} {% endfor %}"), due);
    assert_eq!(render("{% for x in messages[0].x %}{{ x | string + ' ' }}{% endfor %}"), due);
    assert_eq!(render("{% for x in messages[0].x %}{{ x | tojson }} {% endfor %}"), due);
    let floats = "{{ messages[0].x[1] ~ ' ' ~ 1e16 ~ [1, 'a', true, none, 2.0, 1e-5] }}";
    assert_eq!(render(floats), "1e-05 1e+16[1, 'a', True, None, 2.0, 1e-05]");
    let due = "[1e+16, 1e-05] {'a': 1e-05, 'b': (1, 'x', [])} (1.5e+16,) {}";
    assert_eq!(render("{{ messages[0].x[:2] }} {{ {'a': 1e-5, 'b': (1, 'x', [])} }} {{ (1.5e16,) }} {{ {} }}"), due);
    assert_eq!(render("{{ messages[0].x[:2] | string }}{{ undefined ~ none }}"), "[1e+16, 1e-05]None");
    assert_eq!(render("{{ 'h\u{e9}\u{1f600}\u{7f}' | tojson(ensure_ascii=true) }}"), r#""h\u00e9\ud83d\ude00\u007f""#);
}

/// As `get_chat_template`, `from_pretrained` and `apply_chat_template` of transformers 5.24 have it.
#[test]
fn a_row_says_which_template_and_what_it_is_given() {
    let folder = Scratch::copy_of("chat");
    let write = |file: &str, text: &str| std::fs::write(folder.0.join(file), text).unwrap();
    let render = |row: &str| {
        let row = format!(r#"{{"messages": [{{"role": "user", "reasoning": "hm", "content": "Hi"}}]{row}}}"#);
        ChatTemplate::of_folder(&folder.0).unwrap().render(&Conversation::from_json(&row).unwrap(), false).unwrap()
    };
    write(
        "tokenizer_config.json",
        r#"{"bos_token": "<a>", "chat_template": [
            {"name": "default", "template": "{{ documents }} {{ thinking_on }} {{ messages[0].reasoning_content }}"},
            {"name": "tool_use", "template": "{{ bos_token }} {{ tools[0] }} {{ messages[0].thinking }}"}]}"#,
    );
    assert_eq!(render(""), "None  hm");
    let kwargs = r#", "documents": [1], "chat_template_kwargs": {"thinking_on": true}, "id": 3, "tools": null"#;
    assert_eq!(render(kwargs), "[1] True hm");
    assert_eq!(render(r#", "tools": ["f"]"#), "<a> f hm");
    // Tokens of older folders have a file of their own.
    write("special_tokens_map.json", r#"{"bos_token": {"content": "<b>"}}"#);
    assert_eq!(render(r#", "tools": ["f"]"#), "<b> f hm");
    // Files go before the configuration.
    write("chat_template.jinja", "file{{ bos_token }}");
    assert_eq!(render(r#", "tools": ["f"]"#), "file<b>");
    std::fs::create_dir(folder.0.join("additional_chat_templates")).unwrap();
    write("additional_chat_templates/tool_use.jinja", "tools");
    assert_eq!((render(""), render(r#", "tools": []"#)), ("file<b>".into(), "tools".into()));
    write("tokenizer_config.json", r#"{"bos_token": "<a>", "added_tokens_decoder": {}}"#);
    assert_eq!(render(""), "file<a>");
    let row = r#"{"messages": [], "chat_template_kwargs": 3}"#;
    assert!(Conversation::from_json(row).unwrap_err().to_string().contains("`chat_template_kwargs` is no object"));
}

#[test]
fn dates_are_ones_own_to_choose() {
    let template = ChatTemplate::new("{{ strftime_now('%d %b %Y, %B %y-%m') }}", "", "").unwrap();
    let template = template.with_date(ChatDate { year: 2026, month: 3, day: 7 });
    assert_eq!(template.render(&Conversation::new(), false).unwrap(), "07 Mar 2026, March 26-03");
    let error = ChatTemplate::new("{{ strftime_now('%Q') }}", "", "").unwrap().render(&Conversation::new(), false);
    assert!(error.unwrap_err().to_string().contains("%Q"));
}

#[test]
fn templates_that_never_end_or_refuse_are_errors() {
    let talk = Conversation::new().with("user", "Hi").with("user", "again");
    let error = |source: &str| {
        let template = ChatTemplate::new(source, "", "");
        template.and_then(|template| template.render(&talk, false)).unwrap_err().to_string()
    };
    let nested = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
    assert!(error(nested).contains("may never end"), "{}", error(nested));
    let recursive = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
    assert!(error(recursive).contains("chat template"), "{}", error(recursive));
    let long = "{% for a in range(9999) %}{% for b in range(99) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}";
    assert!(error(long).contains("longer than"), "{}", error(long));
    assert!(error("{% if %}").contains("chat template"));
    assert!(error("{{ raise_exception('No, ' ~ messages[0].content) }}").contains("No, Hi"));
    assert!(error("{{ messages[0].content.system.x }}").contains("undefined"));
    assert!(error("{% include '/etc/passwd' %}").contains("chat template"));
    assert!(error(&"x".repeat(2 << 20)).contains("bytes"));
    let mistral = template("mistral").render(&talk, false).unwrap_err().to_string();
    assert!(mistral.contains("roles must alternate"), "{mistral}");
    for row in ["", "[]", "{}", r#"{"messages": "x"}"#, r#"{"messages": [{"content": "x"}]}"#] {
        Conversation::from_json(row).unwrap_err();
    }
}
