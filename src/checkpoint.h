#pragma once
#include "scaler.h"
/* ==== 12. CHECKPOINT ================================================ >>checkpoint ====
 *
 * One safetensors file holds weights, master weights, optimizer state, scaler, random-number state,
 * counters and your own values. Other tools see a model: each weight has its parameter's name. The
 * other entries are "optimizer.0.m.NAME", "scaler.scale", "mixprec.step", "value.NAME" and so on.
 * Numbers are 0-d tensors, bit for bit.
 *
 * Saving writes a temporary file (.NAME.PID.0.tmp) beside the target, flushes it to disk, checks
 * its length, renames it and flushes the folder. After a crash, a power cut, a full disk or lost
 * writes, either the old file or the new file exists complete. Drives that offer no flush (some
 * network and shared drives) save without it; there a power cut may lose the last file. A
 * symbolic link to a file stays a link (a dangling link is replaced). An existing file keeps its
 * mode if the drive allows it. Another hard link to the file keeps the old content. A process that
 * is killed while saving leaves its temporary file, which you must remove. On big-endian machines:
 * MIXP_ERR_DEVICE.
 *
 * Without POSIX (Windows, or MIXPREC_NO_POSIX defined beside the implementation), saving uses plain
 * stdio: temporary file NAME.tmp, no flush to disk. If rename does not replace an existing file, a
 * crash between removing the old file and renaming the new one leaves the new file as NAME.tmp. Any
 * stdio error is then MIXP_ERR_IO, also a file whose length cannot be found.
 */

/* Your own values, such as a data position, saved and restored with the checkpoint. */
typedef struct mixp_checkpoint_value {
    const char *name;
    mixp_dtype  dtype;          /* a dtype of safetensors: see mixp_safetensors_write      */
    int64_t     count;          /* number of elements, at least 1                          */
    void       *data;           /* host memory                                             */
} mixp_checkpoint_value;

/* The result of a load for a weight, or for a state of a parameter. */
typedef enum mixp_weight_fate {
    MIXP_WEIGHT_LOADED,
    MIXP_WEIGHT_CONVERTED,
    MIXP_WEIGHT_MISSING,        /* not in the file; the parameter keeps its value          */
    MIXP_WEIGHT_EXTRA           /* no parameter has the name of this tensor of the file    */
} mixp_weight_fate;

typedef struct mixp_checkpoint {
    mixp_context          *ctx;            /* parameters, step count, seed                 */
    mixp_scaler           *scaler;         /* NULL = none. Each further scaler, as of a GAN:
                                              fill a mixp_scaler_saved with mixp_scaler_save
                                              before saving, put the struct in `values` as
                                              MIXP_U8, and after loading call mixp_scaler_load */
    mixp_optimizer *const *optimizers;
    int                    n_optimizers;
    const mixp_checkpoint_value *values;
    int                    n_values;
    int                    fresh_buffers;  /* for a load, 1: if the file is of another number of
                                              ranks, buffers of MIXP_BUFFER_OWN keep their bytes */
    /* Your own pairs of key and text for the file's metadata, such as a description of the model.
     * Loading ignores them: read them with mixp_safetensors_metadata. NULL = none */
    const char *const    (*metadata)[2];
    int                    n_metadata;
    int                    only_trained;   /* 1: only what an optimizer trains, such as
                                              LoRA, in saving and in loading: the program must
                                              restore the frozen ones                      */
    /* For a load, 1: parameters may have been added or removed since the save, in any optimizer of
     * the same kind and groups. An added one keeps its value and its fresh states, and its bias
     * correction restarts; a removed one is dropped. The other parameters resume bit for bit. Any
     * other difference is an error, also another shape. tell, unless it is NULL, is called after
     * the load for each weight and each state of a parameter by its name in the file:
     * MIXP_WEIGHT_LOADED, _MISSING (added) or _EXTRA (removed) */
    int                    partial;
    void                 (*tell)(void *user, const char *name, mixp_weight_fate fate);
    /* With path NULL, a save calls write_bytes, and a load calls read_bytes, in order and in
     * pieces, so that engines, archives and sockets can hold a checkpoint. They return 0 for all n
     * bytes; otherwise MIXP_ERR_IO: a load changes nothing, and a save does not undo its writes. A
     * load reads exactly the bytes of the checkpoint, with the checks of a file. They must not call
     * mixprec. NULL = files only */
    int                  (*write_bytes)(void *user, const void *bytes, size_t n);
    int                  (*read_bytes)(void *user, void *bytes, size_t n);
    void                  *user;           /* passed to all three                        */
} mixp_checkpoint;

/* Saves to path every parameter and buffer of the context and every view that an optimizer trains.
 * Each must have a unique name. Call it after mixp_scaler_update: gradients are not saved. A save
 * between the micro-batches of an update gives a warning, because a resumed run would lack their
 * gradients. Waits for the device. If states are sharded over ranks, all ranks call it, and rank 0
 * writes the complete file, which loads on any number of ranks, with or without sharding. Likewise
 * if several ranks have buffers of MIXP_BUFFER_OWN, which rank 0 collects in host memory: rank 0's
 * has the buffer's name in the file, rank 2's "mixprec.rank.2.NAME". Such a file loads on as many
 * ranks.
 *
 * MIXP_ERR_ARGUMENT: a name is missing or used twice; or a metadata key is NULL, used twice,
 * "format", or begins with "mixprec". MIXP_ERR_ORDER: the scaler awaits its update. MIXP_ERR_IO,
 * with the system's reason: the file at path is unchanged, except in one case that the message
 * reports: the new file is in place but its folder could not be flushed. */
MIXPREC_API mixp_result mixp_checkpoint_save(const char *path,
                                             const mixp_checkpoint *what);

/* Restores a checkpoint into a context, optimizers and scaler made the same way. Training continues
 * bit for bit as if it had never stopped: a load also forgets the gradients of earlier
 * micro-batches, except those in your views. As in PyTorch, the saved hyper-parameters of the
 * optimizers' groups (lr, betas, eps, weight_decay, momentum, dampening, nesterov) replace the
 * current ones: change them after loading. A group is known by its parameters, in whatever order
 * the program makes its groups; files of versions that did not record them are matched by number.
 * All other fields of a mixp_optimizer_desc (max_norm, schedule, spike, ...), the scaler's rule and
 * the guard's settings are the program's. The file names the kinds of its optimizers; files of
 * versions that did not name them load into any kind with the same states. A file saved on a CPU
 * after a region of f16 or bf16 also records how such products round: without AMX, with AMX or with
 * AMX_F16. If this context's products round differently, mixp_context_warning reports it. If the
 * file lacks the state of the spike check, of a predictive rule or of delayed scaling, that state
 * starts from its beginning. If the file has state of the spike check, a predictive rule, the guard
 * or averages that the program does not use, that state is ignored. Any other difference is an
 * error: a scaler, an optimizer, a parameter or the state of delayed scaling that only the file
 * has; a scaler, an optimizer or a parameter that it lacks. Each rank gets its own buffers back. A
 * file with buffers of another number of ranks is an error, MIXP_ERR_SHAPE, unless fresh_buffers is
 * set: then the own buffers in the file are ignored, and their shapes may differ. Needs host memory
 * for the file's data, also for the own buffers of other ranks; with sharded states also for those
 * of the largest parameter.
 *
 * On an error nothing changes. MIXP_ERR_IO. MIXP_ERR_FORMAT: malformed, not a checkpoint, or a
 * number that no save can write, by itself or together with another (SECURITY.md lists the checks).
 * MIXP_ERR_SHAPE or MIXP_ERR_DTYPE: another model; the message lists the differences, and no memory
 * was allocated for its tensors. MIXP_ERR_SHAPE also: an optimizer of another kind (use
 * mixp_checkpoint_load_weights to load only the weights), or the file has more sites of a guard
 * than this guard's max_sites, or an optimizer's groups have other parameters (the message shows
 * both). MIXP_ERR_ORDER: as in mixp_checkpoint_save. The context keeps the error: a program that
 * then trains from the beginning calls mixp_context_clear_error first. */
MIXPREC_API mixp_result mixp_checkpoint_load(const char *path,
                                             const mixp_checkpoint *what);

/* Loads only the parameters and buffers of a context, and the views that its optimizers train, by
 * name, for inference and fine-tuning. The file may be a checkpoint of mixprec or any safetensors
 * file. Of a checkpoint, other state is ignored, and every rank gets rank 0's buffers. (To read
 * tensors that no optimizer trains, use mixp_safetensors_find.) Master weights follow the weights.
 * desc NULL: every parameter, every buffer and every tensor must match, with its dtype. A warning
 * names a weight that becomes Inf in the parameter's dtype, one that is Inf or NaN in the file (so
 * does mixp_checkpoint_load), and an fp8 weight whose scale in the file is ignored because of
 * allow_extra. */
typedef struct mixp_weights_desc {
    int   allow_missing, allow_extra;   /* 1: such a tensor is not an error                */
    int   convert;              /* 1: another floating-point dtype is not an error: values are
                                   rounded to the parameter's dtype, to nearest even       */
    /* Called after loading: for each parameter in the order of names, then for each extra tensor.
     * NULL = not called. */
    void (*tell)(void *user, const char *name, mixp_weight_fate fate);
    void *user;
    const char *pattern;        /* only parameters whose names fit (* matches any characters, ?
                                   matches one); all others are ignored. NULL = all */
    const char *prefix;         /* prefix of each parameter's name in the file, such as "model.";
                                   other tensors of the file are ignored. NULL = no prefix */
} mixp_weights_desc;

/* On an error nothing changes. MIXP_ERR_IO, MIXP_ERR_FORMAT, MIXP_ERR_SHAPE (shapes, missing and
 * extra tensors) or MIXP_ERR_DTYPE: the message lists the differences. */
MIXPREC_API mixp_result mixp_checkpoint_load_weights(const char *path, mixp_context *ctx,
                                                     const mixp_weights_desc *desc);

/* Saves only these weights and buffers, each in its own dtype, for other programs to read;
 * crash-safe like a checkpoint. In PyTorch,
 * model.load_state_dict(safetensors.torch.load_file(path)) reads the file if names and shapes match
 * the model. With several ranks, one rank calls it, and its own buffers are saved. Waits for the
 * device.
 *
 * MIXP_ERR_ARGUMENT: path is NULL, or a name is missing or used twice. MIXP_ERR_IO: the file at
 * path is unchanged. */
MIXPREC_API mixp_result mixp_checkpoint_save_weights(const char *path, mixp_context *ctx);
/* Like mixp_checkpoint_save_weights for the parameters and buffers that fit desc's pattern, with
 * its prefix: only adapters, for example. desc NULL: all of them. MIXP_ERR_ARGUMENT also: the
 * pattern fits none. */
MIXPREC_API mixp_result mixp_checkpoint_save_weights_of(const char *path, mixp_context *ctx,
                                                        const mixp_weights_desc *desc);

/* --- safetensors files by themselves --- */

#define MIXP_MESSAGE_SIZE 256       /* enough for any message of the functions below       */

typedef struct mixp_st_entry {
    const char *name;
    const char *type;           /* the file's type name: "F32", "BF16", ...; when writing, NULL =
                                   the name of dtype                                       */
    mixp_dtype  dtype;          /* MIXP_DTYPE_COUNT for types passed on as bytes: BOOL, I8, I16,
                                   U16, U32, U64, C64 and the packed F4, F6_E2M3, F6_E3M2  */
    int         rank;
    int64_t     shape[MIXP_MAX_RANK];
    const void *data;           /* host memory; when reading, aligned to 64 bytes          */
    size_t      bytes;
} mixp_st_entry;

/* Writes n entries and n_metadata metadata pairs (names and texts in UTF-8) to path, crash-safe.
 * The bytes depend only on the content, and equal those of the format's own library. Other readers
 * expect the pair "format", "pt". On failure the reason is written to error, which has error_size
 * bytes; NULL: it is not written.
 *
 * MIXP_ERR_ARGUMENT: a name is NULL, used twice, not UTF-8 or "__metadata__"; a metadata key is
 * used twice; or bytes do not match the shape. MIXP_ERR_DTYPE: a dtype that the format lacks.
 * mixprec's F6 and F4 have one byte per element, the format's are packed: write them as U8. */
MIXPREC_API mixp_result mixp_safetensors_write(const char *path,
                                               const mixp_st_entry *entries, int64_t n,
                                               const char *const (*metadata)[2],
                                               int64_t n_metadata, char *error,
                                               size_t error_size);

/* mixp_safetensors_read reads a whole file; *out is NULL on error. mixp_safetensors_free frees it;
 * mixp_safetensors_count is its number of entries. The file is untrusted: the header and all sizes
 * and offsets are checked before memory for tensors is allocated.
 *
 * MIXP_ERR_FORMAT: malformed; the message says where. The checks are stricter than those of the
 * format's own library. These are errors: unknown keys of a tensor, a name or metadata key used
 * twice, NUL in a name, and an empty tensor whose other dimensions multiply to more than 64
 * bits, wherever the 0 stands. MIXP_ERR_DTYPE: a dtype unknown to the format. MIXP_ERR_SHAPE: a
 * rank above MIXP_MAX_RANK. MIXP_ERR_IO: not a regular file, or unreadable. */
typedef struct mixp_safetensors mixp_safetensors;
MIXPREC_API mixp_result mixp_safetensors_read(const char *path, mixp_safetensors **out,
                                              char *error, size_t error_size);
MIXPREC_API void        mixp_safetensors_free(mixp_safetensors *file);
MIXPREC_API int64_t     mixp_safetensors_count(const mixp_safetensors *file);
/* mixp_safetensors_at returns entry i in the order of the data, mixp_safetensors_find the entry
 * of a name, mixp_safetensors_metadata the metadata text of a key. NULL if absent. The results
 * live as long as the file. */
MIXPREC_API const mixp_st_entry *mixp_safetensors_at(const mixp_safetensors *file,
                                                     int64_t i);
MIXPREC_API const mixp_st_entry *mixp_safetensors_find(const mixp_safetensors *file,
                                                       const char *name);
MIXPREC_API const char *mixp_safetensors_metadata(const mixp_safetensors *file,
                                                  const char *key);

