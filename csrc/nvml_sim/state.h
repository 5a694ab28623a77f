/* The state file: what the simulated driver is asked for, one `key value` a line. See state.c. */
#ifndef NVML_SIM_STATE_H
#define NVML_SIM_STATE_H

#include <stdbool.h>
#include <stddef.h>

enum { STATE_MOST_BYTES = 64 * 1024 };

struct state {
    char text[STATE_MOST_BYTES + 1];
};

enum state_result { STATE_READ, STATE_MISSING, STATE_DAMAGED };

/* Read the file as it is now: every call sees the newest state, whole, since writers rename it into place. */
enum state_result state_read(struct state *state);

/* Find a key made by printf's rules; copy its value, cut to `size`. False: there is no such key. */
bool state_text(const struct state *state, char *value, size_t size, const char *key, ...)
    __attribute__((format(printf, 4, 5)));

/* Read an unsigned decimal; leave `value` alone where there is no such key. False: it holds something else. */
bool state_number(const struct state *state, unsigned long long *value, const char *key, ...)
    __attribute__((format(printf, 3, 4)));

/* Parse an unsigned decimal that ends the text. */
bool parse_number(const char *text, unsigned long long *value);

#endif
