/* llama_lora.h - LoRA's adapters: which layers have them, their first values, their files, their
 * sum with the weights: a part of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef TRAINER_LLAMA_LORA_H
#define TRAINER_LLAMA_LORA_H

#include <fnmatch.h>

#define PEFT "base_model.model." /* before the names in the files of the peft library */

static layer *layer_at(int64_t i) { return &m.blocks[i / LINEARS].linear[i % LINEARS]; }

/* The name of linear layer i of the model, such as model.layers.0.self_attn.q_proj. */
static const char *module_of(int64_t i, char *name) {
    snprintf(name, 96, "model.layers.%lld.%s", (long long)(i / LINEARS), linear_names[i % LINEARS]);
    return name;
}

/* Does --targets name it? A pattern fits the whole name, or what follows one of its dots. *fits:
 * by pattern. */
static int is_target(const char *module, int *fits) {
    int found = 0;
    for (const char *p = opt.targets, *end; *p; p = end + (*end == ','), fits++) {
        char pattern[256];
        end = p + strcspn(p, ",");
        snprintf(pattern, sizeof pattern, "%.*s", (int)(end - p), p);
        for (const char *name = module; name;
             name = strchr(name, '.') ? strchr(name, '.') + 1 : NULL)
            if (fnmatch(pattern, name, 0) == 0) {
                found = *fits = 1;
                break;
            }
    }
    return found;
}

static mixp_tensor *adapter(const char *module, char part, int64_t rows, int64_t cols) {
    int64_t shape[2] = { rows, cols };
    return mixp_param_named(m.ctx, MIXP_F32, 2, shape, PEFT "%s.lora_%c.weight", module, part);
}

/* peft's first values: a is uniform in +-1 / sqrt(in), b is 0, so the model begins unchanged. */
static void add_adapter(layer *l, const char *module) {
    l->a = adapter(module, 'A', m.rank, l->w->shape[1]);
    l->b = adapter(module, 'B', l->w->shape[0], m.rank);
    mixp_init_kaiming_uniform(l->a, 0.57735026918962576);
}

static void new_adapters(void) {
    int  fits[256] = { 0 }, n = 0;
    char module[96];
    m.rank = opt.lora;
    m.lora_scale = (float)((opt.alpha < 0 ? 16 : opt.alpha) / (double)opt.lora);
    if (!opt.targets) opt.targets = "q_proj,v_proj";
    if (strlen(opt.targets) >= 256) die(2, "--targets has more than 255 characters");
    for (int64_t i = 0; i < cfg.layers * LINEARS; i++)
        if (is_target(module_of(i, module), fits)) add_adapter(layer_at(i), module);
    for (const char *p = opt.targets; *p; p += strcspn(p, ","), p += *p == ',', n++)
        if (!fits[n])
            die(2,
                "--targets: \"%.*s\" fits no linear layer of %s: they are q_proj, k_proj, v_proj, o_proj, gate_proj, "
                "up_proj and down_proj, in full model.layers.0.self_attn.q_proj",
                (int)strcspn(p, ","), p, opt.model);
}

/* What adapter_config.json may say besides what load_adapters reads. */
#define ADAPTER_KEYS                                                                                         \
    "peft_type peft_version task_type base_model_name_or_path revision inference_mode auto_mapping r "       \
    "lora_alpha lora_dropout bias target_modules exclude_modules layers_to_transform layers_pattern "        \
    "init_lora_weights megatron_core qalora_group_size eva_config corda_config runtime_config"

/* Some first values (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) come with changed weights of the base, which the adapter's
 * file does not hold. */
static void check_first_values(const char *path, const char *value) {
    static const char *const plain[] = { "true", "false", "gaussian", "eva", "orthogonal" };
    char                     text[64] = "an object or a list";
    json_text(value, text, sizeof text);
    for (size_t i = 0; value && i < sizeof plain / sizeof plain[0]; i++)
        if (strcmp(text, plain[i]) == 0) return;
    if (value)
        die(1,
            "%s: init_lora_weights is %s, which also changes the weights of the base: save the adapters with peft's "
            "path_initial_model_for_weight_conversion, or merge them there",
            path, text);
}

/* The adapters of a folder, as peft and this program save them. */
static void load_adapters(void) {
    char         path[PATH_SPACE], module[96];
    weight_files files;
    int64_t      used = 0;
    int          fits[256] = { 0 };
    double       alpha;
    char        *text;
    const char  *root;
    snprintf(path, sizeof path, "%s/adapter_config.json", opt.adapter);
    text = read_json(path, 1 << 20, ". Check --adapter", &root);
    must_be(path, root, "peft_type", "LORA");
    must_be(path, root, "bias", "none");
    check_first_values(path, json_find(root, "init_lora_weights"));
    check_keys(path, root, ADAPTER_KEYS, "");
    m.rank = (int64_t)number_of(path, root, "r", NAN, 1, 65536);
    alpha = number_of(path, root, "lora_alpha", NAN, 0, 1e9);
    m.lora_scale = (float)(alpha / (double)m.rank);
    free(text);
    if (opt.lora > 0 && opt.lora != m.rank)
        die(2, "--lora is %lld, and the rank of %s is %lld: leave out --lora", (long long)opt.lora, path,
            (long long)m.rank);
    if (opt.alpha >= 0 && opt.alpha != alpha)
        die(2, "--alpha is %g, and the alpha of %s is %g: leave out --alpha", opt.alpha, path, alpha);
    snprintf(path, sizeof path, "%s/adapter_model.safetensors", opt.adapter);
    open_weights(&files, path, "--adapter");
    for (int64_t i = 0; i < cfg.layers * LINEARS; i++) {
        char name[160];
        snprintf(name, sizeof name, PEFT "%s.lora_A.weight", module_of(i, module));
        if (!find_weight(&files, name, NULL)) continue;
        add_adapter(layer_at(i), module);
        used += 2;
    }
    for (int64_t i = 0; i < mixp_safetensors_count(files.files[0]); i++)
        if (!mixp_context_find(m.ctx, mixp_safetensors_at(files.files[0], i)->name))
            die(1, "%s: %s fits no linear layer of %s", path,
                mixp_safetensors_at(files.files[0], i)->name, opt.model);
    if (!used) die(1, "%s holds no adapters", path);
    for (int64_t i = 0; opt.targets && i < cfg.layers * LINEARS; i++)
        if (is_target(module_of(i, module), fits) != (layer_at(i)->a != NULL))
            die(2, "--targets %s and %s disagree about %s: leave out --targets", opt.targets, path, module);
    close_weights(&files);
    mixp_checkpoint_load_weights(path, m.ctx,
                                 &(mixp_weights_desc){ .convert = 1, .pattern = PEFT "*" });
    check("loading adapters");
}

#endif
